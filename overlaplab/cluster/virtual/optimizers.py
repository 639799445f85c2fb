"""Optimizers step lists of parameters in a rank, as they do on CUDA.

On a CPU, torch's optimizers step their parameters one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from overlaplab.cluster.virtual import placement
from overlaplab.cluster.virtual.recorder import Recorder


@contextlib.contextmanager
def stepping_lists(recorder: Callable[[], Recorder | None]) -> Iterator[None]:
    """While open, optimizers choose in a rank as they do for CUDA.

    Args:
        recorder: the calling thread's, None where it is no rank.
    """
    optimizer: Any = _optimizer
    devices = optimizer._get_foreach_kernels_supported_devices

    def in_lists() -> list[str]:
        return devices() if recorder() is None else [*devices(), "cpu"]

    patches = [(optimizer, "_get_foreach_kernels_supported_devices", in_lists)]
    lists = (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    )
    for types in lists:
        types.append(FakeTensor)
    try:
        with placement.patched(patches):
            yield
    finally:
        for types in lists:
            types.remove(FakeTensor)
