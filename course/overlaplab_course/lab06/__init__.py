"""What the notebook of lab 06 calls: `from overlaplab_course import lab06 as lab`."""

from overlaplab.grading.kept import Kept, print_finding, side_by_side
from overlaplab_course.gpts import in_bfloat16
from overlaplab_course.lab06.given import (
    ETHERNET,
    INFINIBAND,
    NVLINK,
    GivenRun,
    ReducerState,
    cut,
    measured_step,
    name_gradients,
    record_reducer,
    three_runs,
)
from overlaplab_course.lab06.pairs import cases as unseen_pairs
from overlaplab_course.lab06.show import (
    backward_ns,
    draw_valleys,
    gradient_bytes,
    machine,
    measure_it_here,
    measured,
    message_points,
    one_message,
    shares_text,
    stored_benchmarks,
    stored_ms,
    sweep,
    valley,
)
from overlaplab_course.lab06.trials import KNOBS, WHAT_IF, repair_case, try_ddp, turn
from overlaplab_course.pictures import bucket_fills, ring_all_reduce

_kept = Kept({"6.1": "plan_buckets", "6.2": "install_hooks", "6.3": "finish"}, __name__)
messages = GivenRun.messages
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours


def whose(*exercise_ids: str) -> str:
    """Whose reducer the parts make: the learner's only if each part is theirs."""
    mine = all(exercise_id in _kept for exercise_id in exercise_ids)
    return "your reducer" if mine else "the course's reducer"
