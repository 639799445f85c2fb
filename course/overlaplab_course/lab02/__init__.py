"""What the notebook of lab 02 calls: `from overlaplab_course import lab02 as lab`."""

from overlaplab.grading.kept import Kept, import_later, side_by_side
from overlaplab.timeline.intervals import intersect, merge, total
from overlaplab_course.lab02.given import (
    TRACES,
    both_steps,
    pairs,
    path_of,
    profile_with,
    raw_rows,
    rows_of,
    step_rows,
    time_with,
    trace_step,
    truth,
    whole_steps,
    whole_trace,
)
from overlaplab_course.lab02.show import (
    did_it_pay,
    draw_gaps,
    machine,
    on_gpus,
    pay,
    read,
    spread_ms,
    traced_ms,
    true_ms,
    unprofiled_ms,
    with_gaps,
)
from overlaplab_course.lab02.stopwatch import clock
from overlaplab_course.pictures import events_between_steps
from overlaplab_course.stored import text_table

_kept = Kept(
    {
        "2.1": "time_step",
        "2.2": merge,
        "2.3": "overlap",
        "2.4": "is_communication",
        "2.6": "find_gaps",
    },
    __name__,
)
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours

__getattr__ = import_later(__name__, {"is_communication": "reference:is_communication"})
