"""The grader of lab 16's checkpoints by hand, 16.6: masks are drawn once."""

from __future__ import annotations

from typing import Any

import torch

from overlaplab.grading import Sheet, program_laws
from overlaplab_course.lab16 import reference, stack
from overlaplab_course.lab16.chain_checks import LAB
from overlaplab_course.lab16.masks import Backward, Forward, play
from overlaplab_course.lab16.segment_checks import too_often, wrong_values
from overlaplab_course.lab16.stack import Stack

VALUES, STATE, TWICE, KEEPS = LAB.sentences("16.6")
CASES = (
    (Stack(6, dropout=0.5), 3),
    (Stack(8, dropout=0.1, rows=384), 2),
    (Stack(6), 3),
)


@LAB.grader("16.6")
def grade_by_hand(sheet: Sheet, forward: Forward, backward: Backward) -> None:
    """Gradients, the generator behind the step, forwards and memory."""
    for case, k in CASES:
        name = f"{case.num_layers} layers in {k} blocks, dropout {case.dropout}"
        sheet.ran(f"forward and backward of {name}")
        mine, right = play(case, k, forward, backward), stack.right(case)
        ours = play(case, k, reference.forward, reference.backward)
        sheet.show(mine.timeline, title=f"your checkpoints: {name}")
        wrong = wrong_values(mine, right)
        once = [] if wrong else too_often(mine, case, name)
        hints = {"recorded": LAB.hint(VALUES, "mask")}
        program_laws.hold(
            sheet, mine, wrong=wrong, once=once, what="a gradient", hints=hints
        )
        same = torch.equal(mine.values[0][1], right.values[0][1])
        facts: dict[str, Any] = {"name": name}
        LAB.refuse(sheet, STATE, not same, **facts)
        held, least = (stack.activations(run.timeline, case) for run in (mine, ours))
        LAB.refuse(sheet, KEEPS, held > least + 0.75, held=held, least=least, **facts)
        sheet.stop_if_wrong()
