"""What is measured and with what; a step, as all that measure one run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlaplab.techniques.memory.arguments import described
from overlaplab.techniques.memory.finding import HIDDEN, hides_tensors
from overlaplab.techniques.memory.meters import Meter
from overlaplab.techniques.memory.policies import Policy

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Setting:
    """What is measured, and with what.

    Args:
        policies: the menu; the first leaves a block as it is.
        meter: that measures.
        loss: makes a scalar of what the model returns; None: it is one, or every
            output gets a gradient of its own size.
        compiled_parts: methods of the model that are compiled too.
        backend: of `torch.compile`.
        resident: what lives all the time beside model and inputs: (what, bytes).
    """

    policies: tuple[Policy, ...]
    meter: Meter
    loss: Loss | None = None
    compiled_parts: tuple[str, ...] = ()
    backend: str = "inductor"
    resident: tuple[tuple[str, int], ...] = ()


def differentiable(value: Any) -> list[Tensor]:
    """All tensors in `value`, however nested, that have a gradient."""
    leaves, _ = pytree.tree_flatten(value)
    return [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]


def drop_gradients(*modules: nn.Module) -> None:
    """Of their parameters."""
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def run_step(
    forward: Callable[[], Any],
    setting: Setting,
    turn: Callable[[], object] = lambda: None,
) -> None:
    """A forward, its loss and the backward.

    Args:
        forward: gives the model's outputs.
        setting: has the loss.
        turn: is called between.

    Raises:
        ValueError: no output has a gradient, or the loss cannot be called with them.
    """
    outputs, what = forward(), "the model's output"
    if setting.loss is not None:
        outputs, what = _loss_of(outputs, setting.loss), "what loss returns"
    leaves = differentiable(outputs)
    if not leaves and hides_tensors(outputs):
        raise ValueError(f"{what} is a {type(outputs).__name__}, {HIDDEN}")
    if not leaves:
        raise ValueError(f"{what} has no gradient: nothing is trained")
    turn()
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


def _loss_of(outputs: Any, loss: Loss) -> Tensor:
    try:
        return loss(outputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"loss cannot take what the model returns, {described(outputs)}. "
            f"{type(error).__name__}: {error}. Expected a function that makes a scalar "
            "of it"
        ) from error
