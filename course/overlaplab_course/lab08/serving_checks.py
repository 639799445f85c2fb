"""The grader of lab 08's swap, 8.6."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from overlaplab.grading import Sheet, laws
from overlaplab.grading.forms import judge_step
from overlaplab.view import format_bytes
from overlaplab_course.lab03.jobs import SET_UP
from overlaplab_course.lab08 import reference, serving
from overlaplab_course.lab08.feed_checks import LAB
from overlaplab_course.lab08.serving import Serve, Served

UNTOUCHED, NEWEST, BY_REFERENCE, CPU, SHORT = LAB.sentences("8.6")


@lru_cache(maxsize=4)
def best(num_versions: int, num_ranks: int) -> Served:
    """The course's own."""
    return serving.serve(reference.serve, num_versions, num_ranks)


@LAB.grader("8.6")
def grade_serve(sheet: Sheet, serve: Serve) -> None:
    """Four versions and five, so that each set is in front at the end of one."""
    for num_versions, num_ranks in ((4, 2), (5, 3)):
        sheet.ran(f"{num_versions} new versions of the weights, {num_ranks} ranks")
        right = best(num_versions, num_ranks)
        seen = serving.serve(serve, num_versions, num_ranks)
        seen.draw_on(sheet, right.step_ns, "your run")
        sheet.verify(UNTOUCHED, laws.no_findings_law(seen.findings))
        _judge_answers(sheet, seen, right)
        for rank in range(num_ranks):
            moved = seen.copied_bytes(rank)
            facts: dict[str, Any] = {"rank": rank, "moved": format_bytes(moved)}
            LAB.refuse(sheet, BY_REFERENCE, moved > serving.BYTES // 4, **facts)
            waits = [op for op in seen.program.ranks[rank] if op.kind == "host_wait"]
            own = [op for op in waits if op.label != SET_UP]
            name = own[0].name if own else ""
            LAB.refuse(sheet, CPU, bool(own), rank=rank, name=name)
        sheet.stop_if_wrong()
        judge_step(sheet, SHORT, seen, right.step_ns)
        sheet.stop_if_wrong()


def _judge_answers(sheet: Sheet, seen: Served, right: Served) -> None:
    for rank, (mine, ours) in enumerate(zip(seen.values, right.values, strict=True)):
        pairs = enumerate(zip(mine, ours, strict=False))
        wrong = [i for i, (a, b) in pairs if not torch.allclose(a, b, rtol=1e-4)]
        facts: dict[str, Any] = {"rank": rank, "number": len(mine)}
        facts |= {"wanted": len(ours), "which": wrong[0] if wrong else "no wrong one"}
        bad = bool(wrong) or len(mine) != len(ours)
        LAB.refuse(sheet, NEWEST, bad, **facts)
    sheet.verify(NEWEST, laws.origin_law(seen.program, what="an answer"))
