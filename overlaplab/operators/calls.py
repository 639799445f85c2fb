"""What one call of an operator reads and writes: its arguments, by the facts."""

from __future__ import annotations

from typing import Any

import torch

from overlaplab.operators.facts import Operator

_MASKS = frozenset({torch.bool, torch.uint8})
_GRADIENTS = 1  # among the lists of a fused step


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, in order; lists are looked into."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def written(facts: Operator, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that a call writes, its results aside."""
    values = [args[i] for i in facts.writes if i < len(args)]
    if facts.scales_gradients and kwargs.get("grad_scale") is None:
        del values[_GRADIENTS]
    values += [kwargs[name] for name in facts.writes_named if name in kwargs]
    return tensors_in(values)


def read(
    facts: Operator, args: Any, kwargs: Any, writes: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The arguments whose values a call needs.

    Args:
        writes: what `written` found of it.
    """
    if not facts.reads:
        return []
    found = tensors_in(args)
    if kwargs:
        found += tensors_in(kwargs.values())
    if facts.overwrites:
        found = [t for t in found if not any(t is w for w in writes)]
    return found


def aliased(facts: Operator, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments of whose memory the results of a call are."""
    values = []
    for key in facts.aliases:
        if isinstance(key, str):
            values.append(kwargs.get(key))
        elif key < len(args):
            values.append(args[key])
    return tensors_in(values)


def waits_for_mask(args: Any) -> bool:
    """Whether an operator that indexes has to count the ones of a mask.

    A put of one value is a masked fill instead.
    """
    if len(args) > 2 and args[2].numel() == 1:
        return False
    return any(index is not None and index.dtype in _MASKS for index in args[1])
