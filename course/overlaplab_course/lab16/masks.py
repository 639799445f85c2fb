"""Checkpoints by hand, around blocks that draw random numbers: 16.6 and its grader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overlaplab.cluster.run import Run
from overlaplab.grading import Sheet, program_laws
from overlaplab_course.lab16 import reference, stack
from overlaplab_course.lab16.chain_checks import LAB
from overlaplab_course.lab16.segment_checks import too_often, wrong_values
from overlaplab_course.lab16.stack import Stack

VALUES, STATE, TWICE, KEEPS = LAB.sentences("16.6")
Forward = Callable[[nn.Module, Tensor], tuple[Tensor, Any]]
Backward = Callable[[nn.Module, Tensor, Any, Tensor], Tensor]
CASES = (
    (Stack(6, dropout=0.5), 3),
    (Stack(8, dropout=0.1, rows=384), 2),
    (Stack(6), 3),
)


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Forward, second: Backward, block: nn.Module, x: Tensor
    ) -> Tensor:
        y, ctx.remembered = first(block, x)
        ctx.second, ctx.block = second, block
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return None, None, None, ctx.second(ctx.block, x, ctx.remembered, grad)


def _blocks(
    first: Forward, second: Backward, layers: Sequence[nn.Module], x: Tensor, k: int
) -> Tensor:
    """The stack as k blocks, each checkpointed by hand."""
    apply: Any = _ByHand.apply
    size = len(layers) // k
    x = x.detach().requires_grad_()
    for start in range(0, len(layers), size):
        x = apply(first, second, nn.Sequential(*layers[start : start + size]), x)
    return x


def play(case: Stack, k: int, first: Forward, second: Backward) -> Run:
    """The stack in k blocks, with these two functions."""
    return stack.play(case, partial(_blocks, first, second), k)


def draws_text(first: Forward, second: Backward) -> str:
    """How far the gradients are from those without checkpoints, by dropout."""
    lines = []
    for dropout in (0.0, 0.1, 0.5):
        case = Stack(6, dropout=dropout)
        mine, right = play(case, 3, first, second), stack.right(case)
        pairs = zip(mine.values[0][0][1:], right.values[0][0][1:], strict=True)
        off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        lines.append(f"dropout {dropout}: gradients are off by up to {off:.0%}")
    return "\n".join(lines)


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
