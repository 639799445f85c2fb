"""Forms of exercises that recur from lab to lab: a lab declares them as data."""

from overlaplab.grading.answered import as_number
from overlaplab.grading.forms.answers import (
    find_slip,
    is_close,
    judge_numbers,
    not_filled_in,
    read_numbers,
    read_pairs,
    said_timeline,
    write_number,
)
from overlaplab.grading.forms.knobs import KnobProgram, KnobTasks, Settings
from overlaplab.grading.forms.repair import Repair, check_diagnosis
from overlaplab.grading.forms.results import (
    Examined,
    judge_step,
    need_dict,
)

__all__ = [
    "Examined",
    "KnobProgram",
    "KnobTasks",
    "Repair",
    "Settings",
    "as_number",
    "check_diagnosis",
    "find_slip",
    "is_close",
    "judge_numbers",
    "judge_step",
    "need_dict",
    "not_filled_in",
    "read_numbers",
    "read_pairs",
    "said_timeline",
    "write_number",
]
