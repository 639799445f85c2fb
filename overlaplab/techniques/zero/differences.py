"""What is saved and what is to be loaded differ: every name and shape in one error.

Knows state dicts and metadata of checkpoints, no rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

_NUM_SHOWN = 10


def differing_tensors(
    saved: Mapping[str, Any], state: Mapping[str, Any], what: str
) -> Iterator[str]:
    """Of the model; what is no tensor may be stored in parts, below its name."""
    tensors = [name for name, value in state.items() if isinstance(value, Tensor)]
    others = [name for name in state if name not in tensors]
    below = tuple(f"{name}." for name in others)
    found = [n for n in saved if n not in others and not n.startswith(below)]
    yield from differing_names(found, tensors, what)
    for name in tensors:
        if name in saved:
            yield from differing_shape(name, saved[name], state[name].shape)


def differing_names(
    saved: Iterable[str], mine: Iterable[str], what: str
) -> Iterator[str]:
    """A sentence for each name that only one side has; `what` is the saved side."""
    saved, mine = dict.fromkeys(saved), dict.fromkeys(mine)
    yield from (f"{name} is not in {what}" for name in mine if name not in saved)
    yield from (f"{name} is in {what} alone" for name in saved if name not in mine)


def differing_shape(name: str, stored: Any, shape: Sequence[int]) -> Iterator[str]:
    """A sentence if `stored`, metadata or a tensor, has not this shape."""
    found = shape_of(stored)
    if found != tuple(shape):
        what = "no tensor" if found is None else f"of shape {found}"
        yield f"{name} is {what} there and of shape {tuple(shape)} here"


def raise_differences(what: str, problems: Sequence[str]) -> NoReturn:
    """Raise ValueError with the first of them."""
    rows = "\n  ".join(problems[:_NUM_SHOWN])
    more = len(problems) - _NUM_SHOWN
    raise ValueError(
        f"{what} does not fit this model; nothing was loaded:\n  {rows}"
        + (f"\n  and {more} more" if more > 0 else "")
    )


def shape_of(stored: object) -> tuple[int, ...] | None:
    """Of a tensor, or of the metadata of one; None for what is none."""
    if isinstance(stored, Tensor):
        return tuple(stored.shape)
    size = getattr(stored, "size", None)
    return tuple(size) if isinstance(size, torch.Size) else None
