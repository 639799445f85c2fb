"""What the notebook of lab 05 calls: `from overlaplab_course import lab05 as lab`."""

from typing import Any

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab05.given import (
    BOARD,
    MIB,
    SITUATIONS,
    TIED,
    UNTIED,
    Model,
    Seen,
    hook_case,
    named,
    play,
    record_gpt,
)
from overlaplab_course.lab05.setups import Setup
from overlaplab_course.lab05.show import (
    bound_of,
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

_OURS = {
    "5.1": "windows",
    "5.3": "PromptReducer",
    "5.4a": "to_launch",
    "5.4": "OrderedReducer",
}
_kept = Kept({k: f"overlaplab_course.lab05.reference:{v}" for k, v in _OURS.items()})
keep, mine_or_ours, whose, ours = (
    _kept.keep,
    _kept.mine_or_ours,
    _kept.whose,
    _kept.ours,
)


def __getattr__(name: str) -> Any:
    """The repairs need the broken reducers, which the course's build writes."""
    if name != "repair_cases":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from overlaplab_course.lab05.repairs import repair_cases

    return repair_cases
