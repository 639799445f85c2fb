"""What a reducer is asked for, checked before anything is sent."""

from __future__ import annotations

import math

import torch
from torch import nn

from overlaplab.techniques.data_parallel.buckets import MIB


def check_model(model: object) -> None:
    """Raise TypeError if it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module"
        )


def check_max_in_flight(number: object) -> None:
    """Raise TypeError or ValueError if it is no number of buckets, nor None."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"max_in_flight is {number!r}; expected an int")
    if number < 1:
        raise ValueError(f"max_in_flight is {number}; expected 1 or more")


def check_reduce_dtype(dtype: object) -> None:
    """Raise TypeError or ValueError if it is no float dtype, nor None."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"reduce_dtype is {dtype!r}; expected a dtype, such as torch.float32"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"reduce_dtype is {dtype}; expected a float dtype")


def cap_of(name: str, mib: object) -> int:
    """The cap in bytes, at least 1.

    Raises:
        TypeError: no number.
        ValueError: not finite, or not above 0.
    """
    if isinstance(mib, bool) or not isinstance(mib, int | float):
        raise TypeError(f"{name} is {mib!r}; expected a number of MiB")
    if not 0 < mib < math.inf:
        raise ValueError(f"{name} is {mib}; expected a finite number above 0 MiB")
    return max(1, int(mib * MIB))
