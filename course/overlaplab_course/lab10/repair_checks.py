"""The grader of lab 10's repair, 10.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import check_diagnosis, need_dict
from overlaplab_course.lab10.given import Stack, Weights
from overlaplab_course.lab10.repairs import DEPTH, repair_case
from overlaplab_course.lab10.step_checks import LAB, Case, judge_prefetcher

# Another shape, on the other number of ranks.
ELSEWHERE = Stack(num_layers=4, width=40, rows=48, tables=(0, 0, 300, 0))
DIAGNOSIS = LAB.sentences("10.6")[0]


@LAB.grader("10.6")
def grade_repair(
    sheet: Sheet,
    my_number: int,
    diagnosis: Mapping[str, Any],
    wide: Weights,
    hasty: Weights,
) -> None:
    """The one that the number draws: diagnosed, and then a prefetcher like 10.3's."""
    own = repair_case(my_number)
    need_dict(diagnosis, "the diagnosis")
    sheet.ran(f"{own.name!r} as you repaired it, on your stack")
    truth = {"kind": own.kind, "layer": own.layer}
    kinds = LAB.cases("10.6", "kinds")[DIAGNOSIS]
    check_diagnosis(sheet, DIAGNOSIS, diagnosis, truth, kinds=kinds)
    repaired = {"wide": wide, "hasty": hasty}[own.name]
    whose = f"your {own.name!r}, repaired"
    case = Case("your stack", own.stack, own.num_ranks, DEPTH)
    judge_prefetcher(sheet, case, repaired, whose)
    sheet.stop_if_wrong()
    elsewhere = Case("4 layers of width 40", ELSEWHERE, 5 - own.num_ranks, DEPTH)
    judge_prefetcher(sheet, elsewhere, repaired, whose, draw=False)
