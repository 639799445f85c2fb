"""What the notebook of lab 01 calls: `from overlaplab_course import lab01 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab01.given import (
    GPU,
    GRADIENT_BYTES,
    cards,
    contended,
    from_backward,
    job,
    recorded,
    slow_gpu,
    step_and_hidden,
    ten_layers,
    uncontended,
    with_contention,
)
from overlaplab_course.lab01.messages import (
    GLOBAL_TOKENS,
    GPUS,
    KNOBS,
    LINKS,
    PARAMETERS,
    count,
    given_share,
    jobs,
    link_of,
    turn,
)
from overlaplab_course.lab01.show import (
    draw_counted,
    machine,
    measure_it_here,
    measured,
    measured_alone,
)
from overlaplab_course.pictures import hidden_and_exposed, ring_all_reduce

WHAT_IF, saved_percent = turn.what_if, turn.saved_percent
_kept = Kept({"1.4": "ratios", "1.5": "schedule"}, __name__)
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours
