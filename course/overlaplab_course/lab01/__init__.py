"""What the notebook of lab 01 calls: `from overlaplab_course import lab01 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab01.given import (
    GLOBAL_TOKENS,
    GPU,
    GPUS,
    GRADIENT_BYTES,
    KNOBS,
    LINKS,
    PARAMETERS,
    cards,
    contended,
    count,
    from_backward,
    given_share,
    job,
    jobs,
    link_of,
    recorded,
    slow_gpu,
    step_and_hidden,
    ten_layers,
    totals_of,
    turn,
    uncontended,
    with_contention,
)
from overlaplab_course.lab01.show import (
    draw_counted,
    machine,
    measure_it_here,
    measured,
    measured_alone,
)

WHAT_IF, saved_percent = turn.what_if, turn.saved_percent
_OURS = "overlaplab_course.lab01.reference:"
_kept = Kept({"1.4": _OURS + "ratios", "1.5": _OURS + "schedule"})
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours
