"""The ways to spend memory that are compared: ours, and what people do by hand.

All run on one model: a variant changes it while it is entered and leaves it as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overlaplab.techniques.memory import CheckpointPlan
from overlaplab.techniques.memory.policies import budgeted


@dataclass
class Variant:
    """One way to run a step.

    Args:
        name: in tables and results.
        kind: "eager" or "compiled": which peers and plans are compared.
        is_peer: what people have without us.
        enter: while its value is entered, the model runs this way; gives what to call.
        plan: ours.
    """

    name: str
    kind: str
    is_peer: bool
    enter: Callable[[], contextlib.AbstractContextManager[Callable[..., Any]]]
    plan: CheckpointPlan | None = None
    results: dict[str, Any] = field(default_factory=dict)
    step_ns: list[int] = field(default_factory=list)


def planned(
    name: str, kind: str, model: nn.Module, plan: CheckpointPlan, *, is_peer: bool
) -> Variant:
    """A plan at work."""

    @contextlib.contextmanager
    def enter() -> Iterator[Callable[..., Any]]:
        with plan.apply(model):
            yield model

    return Variant(name, kind, is_peer, enter, plan)


def whole(model: nn.Module, budget: float, k: int, backend: str) -> Variant:
    """The whole model compiled, with torch's budget or every k-th block checkpointed.

    Args:
        budget: torch's activation budget; 1: none.
        k: 0: no block is checkpointed by hand.
    """
    name = f"whole compiled, budget {budget:g}"
    if k:
        name = f"whole compiled, every {k}"
    blocks = [b for i, b in enumerate(model.blocks) if k and not i % k]  # type: ignore[arg-type]
    # The same objects each time, or Dynamo compiles anew.
    forwards = [
        functools.partial(checkpoint, block.forward, use_reentrant=False)
        for block in blocks
    ]
    run = torch.compile(model, backend=budgeted(backend, budget), dynamic=False)

    @contextlib.contextmanager
    def enter() -> Iterator[Callable[..., Any]]:
        for block, forward in zip(blocks, forwards, strict=True):
            block.__dict__["forward"] = forward
        try:
            yield run
        finally:
            for block in blocks:
                del block.__dict__["forward"]

    return Variant(name, "compiled", True, enter)
