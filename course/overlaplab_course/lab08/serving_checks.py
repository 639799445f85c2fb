"""The grader of lab 08's swap, 8.6."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from overlaplab.grading import Sheet, Violation, program_laws
from overlaplab.grading.forms import judge_step
from overlaplab.view import format_bytes
from overlaplab_course.lab03.jobs import SET_UP, WIDTH
from overlaplab_course.lab08 import reference, serving
from overlaplab_course.lab08.feed_checks import LAB
from overlaplab_course.lab08.serving import Serve, Served

UNTOUCHED, NEWEST, BY_REFERENCE, CPU, SHORT = LAB.sentences("8.6")


# Versions, ranks and rows of weights.
CASES = ((4, 2, serving.ROWS), (5, 3, 4 * WIDTH))


@lru_cache(maxsize=4)
def best(num_versions: int, num_ranks: int, rows: int) -> Served:
    """The course's own."""
    return serving.serve(reference.serve, num_versions, num_ranks, rows)


@LAB.grader("8.6")
def grade_serve(sheet: Sheet, serve: Serve) -> None:
    """Four versions and five, so that each set is in front at the end of one."""
    for case in CASES:
        num_versions, num_ranks, rows = case
        sheet.ran(f"{num_versions} new versions of the weights, {num_ranks} ranks")
        seen, right = serving.serve(serve, *case), best(*case)
        seen.draw_on(sheet, right.step_ns, "your run")
        program_laws.hold(
            sheet,
            seen.run,
            wrong=_wrong_answers(sheet, seen, right),
            what="an answer",
            but=(SET_UP,),
        )
        for rank in range(num_ranks):
            moved = seen.copied_bytes(rank)
            facts: dict[str, Any] = {"rank": rank, "moved": format_bytes(moved)}
            LAB.refuse(sheet, BY_REFERENCE, moved > rows * WIDTH, **facts)
        sheet.stop_if_wrong()
        judge_step(sheet, SHORT, seen, right.step_ns)
        late = program_laws.slow_law(serving.SLOWER, seen.program, right.program)
        sheet.verify(SHORT, late)
        sheet.stop_if_wrong()


def _wrong_answers(sheet: Sheet, seen: Served, right: Served) -> list[Violation]:
    found = []
    for rank, (mine, ours) in enumerate(zip(seen.values, right.values, strict=True)):
        pairs = enumerate(zip(mine, ours, strict=False))
        wrong = [i for i, (a, b) in pairs if not torch.allclose(a, b, rtol=1e-4)]
        facts: dict[str, Any] = {"rank": rank, "number": len(mine)}
        facts |= {"wanted": len(ours), "which": wrong[0] if wrong else "no wrong one"}
        if wrong or len(mine) != len(ours):
            found.append(LAB.violation(sheet, NEWEST, **facts))
    return found
