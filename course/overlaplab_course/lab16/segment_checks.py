"""The grader of lab 16's segments, 16.2: a stack is run, with values and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overlaplab.cluster.run import Run
from overlaplab.grading import Sheet, program_laws
from overlaplab.grading.violation import Violation
from overlaplab_course.lab16 import reference, stack
from overlaplab_course.lab16.chain_checks import LAB
from overlaplab_course.lab16.stack import Segmented, Stack

VALUES, TWICE, SEGMENTS, STATE = LAB.sentences("16.2")
CASES = (
    (Stack(16), 4),
    (Stack(14, rows=640), 5),
    (Stack(6), 6),
    (Stack(7), 1),
    (Stack(9, dropout=0.25), 3),
)
SLACK = 1.25  # activations: longer segments may stand anywhere


@LAB.grader("16.2")
def grade_segmented(sheet: Sheet, segmented: Segmented) -> None:
    """Even and uneven segments, and layers that draw random numbers."""
    for case, k in CASES:
        words = " with dropout" if case.dropout else ""
        name = f"{case.num_layers} layers{words} in {k} segments"
        sheet.ran(f"forward and backward of {name}")
        played, best = (
            stack.play(case, segmented, k),
            stack.play(case, reference.segmented, k),
        )
        times = {"step_ns": played.timeline.step_ns, "target_ns": best.timeline.step_ns}
        sheet.show(played.timeline, title=f"your segments: {name}", **times)
        wrong = wrong_values(played, stack.right(case))
        once = [] if wrong else too_often(played, case, name)
        program_laws.hold(sheet, played, wrong=wrong, once=once, what="a gradient")
        facts: dict[str, Any] = {"name": name}
        held, least = (
            stack.activations(played.timeline, case),
            stack.activations(best.timeline, case),
        )
        LAB.refuse(
            sheet, SEGMENTS, held > least + SLACK, held=held, least=least, **facts
        )
        same = torch.equal(played.values[0][1], stack.right(case).values[0][1])
        LAB.refuse(sheet, STATE, not same, **facts)
        sheet.stop_if_wrong()


def too_often(played: Run, case: Stack, name: str) -> list[Violation]:
    """More forwards than each layer's own and one again."""
    computed, most = stack.num_forwards(played), 2 * case.num_layers
    if computed <= most:
        return []
    seen = f"{name}: {computed} forwards of layers"
    return [Violation("once", seen, f"{most} at most: each layer once, and once again")]


def wrong_values(played: Run, plain: Run) -> list[Violation]:
    """What is not equal to the last bit."""
    mine: Sequence[Tensor] = played.values[0][0]
    right: Sequence[Tensor] = plain.values[0][0]
    if len(mine) != len(right):
        missing = len(right) - len(mine)
        return [
            Violation(
                "values",
                f"{missing} of {len(right) - 1} weights have no gradient",
                "a gradient for each",
                "does use_reentrant=False stand in your call? The older way wants an "
                "input that requires grad",
            )
        ]
    names = ("the output", *(f"the gradient of layer {i}" for i in range(len(right))))
    for name, a, b in zip(names, mine, right, strict=False):
        if a.shape != b.shape or not torch.equal(a, b):
            off = (a - b).abs().max().item() if a.shape == b.shape else float("nan")
            return [
                Violation(
                    "values",
                    f"{name} differs from that of the plain stack by up to {off:.3g}",
                    "equal to the last bit: the same operators on the same numbers",
                )
            ]
    return []
