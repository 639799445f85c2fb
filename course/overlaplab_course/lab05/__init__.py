"""What the notebook of lab 05 calls: `from overlaplab_course import lab05 as lab`."""

from overlaplab.grading.kept import Kept, import_later, side_by_side
from overlaplab_course.lab05.given import (
    BOARD,
    MIB,
    SITUATIONS,
    TIED,
    UNTIED,
    Seen,
    hook_case,
    named,
    play,
)
from overlaplab_course.lab05.setups import Setup
from overlaplab_course.lab05.show import (
    how_it_ended,
    layers_table,
    machine,
    measured_ms,
    measured_table,
    must_be_exposed,
    orders,
    outcome,
    repair_report,
    steps_table,
    windows_table,
)

_kept = Kept(
    {
        "5.1": "windows",
        "5.3": "PromptReducer",
        "5.4a": "to_launch",
        "5.4": "OrderedReducer",
    },
    __name__,
)
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
ours = _kept.ours


# The repairs need the broken reducers, which the course's build writes.
__getattr__ = import_later(__name__, {"repair_cases": "repairs:repair_cases"})
