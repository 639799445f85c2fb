"""Optimizers step lists of parameters in a rank, as they do on CUDA.

On a CPU, torch's optimizers step their parameters one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from overlaplab.cluster.virtual.patching import in_ranks, patched


@contextlib.contextmanager
def stepping_lists() -> Iterator[None]:
    """While open, optimizers choose in a rank as they do for CUDA."""
    optimizer: Any = _optimizer
    name = "_get_foreach_kernels_supported_devices"
    in_lists = in_ranks(optimizer, name, lambda _, devices: [*devices(), "cpu"])
    lists = optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types
    for types in lists:
        types.append(FakeTensor)
    try:
        with patched([in_lists]):
            yield
    finally:
        for types in lists:
            types.remove(FakeTensor)
