"""The grader of lab 13's missing line, 13.8: the code runs with the learner's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlaplab.cluster.run import Run
from overlaplab.errors import RankError
from overlaplab.grading import Sheet, laws
from overlaplab.grading.forms import need_dict
from overlaplab_course.lab13.pass_checks import LAB
from overlaplab_course.lab13.two_streams import LINES, Cut, cut

KIND, SAFE, ON = LAB.sentences("13.8")
KINDS = LAB.cases("13.8", "kinds")[KIND]


@LAB.grader("13.8")
def grade_missing(sheet: Sheet, number: int, missing: Mapping[str, object]) -> None:
    """What was found is named; then the code runs with the line in its place."""
    case = cut(number)
    need_dict(missing, "missing")
    line, put = missing.get("line"), missing.get("put")
    if isinstance(line, bool) or line not in range(1, len(case.lines) + 1):
        raise ValueError(
            f"missing['line'] is {line!r}; expected the number of a line, 1 to "
            f"{len(case.lines)}"
        )
    if put not in LINES:
        raise ValueError(f"missing['put'] is {put!r}; expected one of a to f")
    found = laws.diagnosis_law(missing, {"kind": case.kind}, kinds=KINDS)
    hint = LAB.hint(KIND, "kind" if found else "")
    sheet.verify(KIND, found, hint=hint, settled=True)
    told: dict[str, Any] = {"line": line, "put": LINES[str(put)]}
    sheet.ran(f"the code with `{told['put']}` behind line {line}, on two ranks")
    assert isinstance(line, int)
    try:
        run = case.play(case.mended(line, str(put)))
    except RankError as error:
        LAB.refuse(sheet, SAFE, True, what=f"it ends with {error.__cause__!r}", **told)
        return
    LAB.refuse(sheet, SAFE, bool(what := _too_early(case, run)), what=what, **told)
    LAB.refuse(sheet, ON, _cpu_waits(run) > _cpu_waits(case.whole), **told)


def _too_early(case: Cut, run: Run) -> str:
    if run.warnings:
        return f"{len(run.warnings)} findings, the first a {run.warnings[0].kind}"
    for rank, (mine, right) in enumerate(
        zip(run.values, case.whole.values, strict=True)
    ):
        if not all(map(torch.equal, mine, right)):
            return f"rank {rank} has other averages"
    return ""


def _cpu_waits(run: Run) -> int:
    assert run.program is not None
    return sum(op.kind == "host_wait" for ops in run.program.ranks for op in ops)
