"""Checkpoints by hand, around blocks that draw random numbers: what 16.6 runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overlaplab.cluster.run import Run
from overlaplab_course.lab16 import stack
from overlaplab_course.lab16.stack import Stack

Forward = Callable[[nn.Module, Tensor], tuple[Tensor, Any]]
Backward = Callable[[nn.Module, Tensor, Any, Tensor], Tensor]


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
