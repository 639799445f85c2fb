"""One block of each kind alone: what it keeps, needs and takes under each policy.

Knows nothing of the model around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from overlaplab.techniques.memory.chain import Option
from overlaplab.techniques.memory.cutting import Kind
from overlaplab.techniques.memory.meters import Meter
from overlaplab.techniques.memory.policies import Policy, runner
from overlaplab.techniques.memory.setting import (
    Setting,
    differentiable,
    drop_gradients,
)


def measure_menu(kind: Kind, setting: Setting, notes: list[str]) -> Iterator[Option]:
    """The options of a kind; those that its blocks cannot do are left out."""
    for number, policy in enumerate(setting.policies):
        if policy.recompute and kind.writes:
            continue
        try:
            option = _measure(kind, policy, setting.meter)
            if not number:
                option = replace(option, forward_ns=_forward_ns(kind, setting))
            yield option
        except RuntimeError as error:
            if not number:
                raise
            first = str(error).strip().splitlines()[0]
            notes.append(f"{kind.name} without {policy.name!r}: {first}")


def _measure(kind: Kind, policy: Policy, meter: Meter) -> Option:
    """A block alone: bytes of one forward and backward, and their time."""
    run = runner(policy, kind.block, replays=meter.computes)
    numbers: list[tuple[int, int, int, int, int]] = []
    # Without values one pass gives both; with them, what is compiled or allocated in a
    # first one is no step's.
    for _ in range(2 * meter.computes):
        _bytes_of(kind, run, meter)
    ns = meter.step_ns(
        functools.partial(_repeat, kind, run)
        if meter.computes
        else lambda: numbers.append(_bytes_of(kind, run, meter))
    )
    kept, forward, backward, output, gradients = (
        numbers[0] if numbers else _bytes_of(kind, run, meter)
    )
    return Option(
        policy.name,
        kept,
        forward,
        backward,
        output,
        gradients,
        ns,
        launch_ns=meter.launch_ns,
    )


def _forward_ns(kind: Kind, setting: Setting) -> int:
    """Of the block as it is, its forward."""
    run = runner(setting.policies[0], kind.block)
    return setting.meter.step_ns(lambda: _run(kind, run))


def _repeat(kind: Kind, run: Callable[..., Any]) -> None:
    """A forward and backward, as fast as it goes."""
    outputs, _ = _run(kind, run)
    if not kind.gradients:
        kind.gradients = [torch.randn_like(o) for o in outputs]
    torch.autograd.backward(outputs, kind.gradients)
    drop_gradients(kind.block)


def _bytes_of(
    kind: Kind, run: Callable[..., Any], meter: Meter
) -> tuple[int, int, int, int, int]:
    """kept, forward, backward, output and gradient bytes, as `Option` has them."""
    start = meter.live_bytes()
    meter.mark()
    outputs, leaves = _run(kind, run)
    with_outputs = meter.live_bytes() - start
    forward = meter.peak_bytes() - start
    kept = with_outputs - _stand_in_bytes(kind, meter)
    turn = _Turn(meter)
    apply: Any = _End.apply
    end = apply(turn, *outputs)
    del outputs
    dropped = meter.live_bytes() - start
    torch.autograd.backward(end, torch.empty_like(end))
    backward = meter.peak_bytes() - start - turn.gradient_bytes
    del end
    for leaf in leaves:
        leaf.grad = None
    gradients = meter.live_bytes() - start
    drop_gradients(kind.block)
    return kept, forward, backward, max(0, dropped - kept), gradients


def _run(kind: Kind, run: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Its differentiable outputs, and the inputs that get gradients."""
    device_type, dtype, enabled = kind.autocast
    args, kwargs = kind.inputs()
    with torch.autocast(device_type, dtype, enabled):
        outputs = run(*args, **kwargs)
    return differentiable(outputs), differentiable((args, kwargs))


def _stand_in_bytes(kind: Kind, meter: Meter) -> int:
    """What the skeleton has for its outputs."""
    tensors = [o for o in kind.outputs if isinstance(o, Tensor)]
    return sum(meter.rounded(t.numel() * t.element_size()) for t in tensors)


@dataclass
class _Turn:
    """Where a forward ends and its backward begins."""

    meter: Meter
    gradient_bytes: int = 0


class _End(torch.autograd.Function):
    """Takes a block's outputs; gives them gradients that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, *outputs: Tensor) -> Tensor:
        ctx.turn, ctx.device = turn, outputs[0].device
        # Laid out as autograd would: dense, also where an output is a part of more.
        dense = [torch.empty_like(o.detach(), device="meta").stride() for o in outputs]
        ctx.like = [
            (o.shape, strides, o.dtype)
            for o, strides in zip(outputs, dense, strict=True)
        ]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        meter = ctx.turn.meter
        before = meter.live_bytes()
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=ctx.device)
            for shape, stride, dtype in ctx.like
        ]
        if meter.computes:
            for gradient in made:
                gradient.fill_(1)
        ctx.turn.gradient_bytes = meter.live_bytes() - before
        meter.mark()
        return (None, *made)
