"""The ways to feed a step with batches that `double_buffer` compares.

Each is an endless iterator of batches on the device. Their loaders have their batches
ready and do nothing but hand them out: what is measured is the way to the device.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from overlaplab import streams
from overlaplab.techniques.double_buffer import BatchPrefetcher

NUM_READY = 2  # different batches of a loader
NUM_WORKERS = 2
_SHARED = Path("/dev/shm")  # where DataLoader's workers put batches, on Linux


class _Ready(IterableDataset[Tensor]):
    """Hands out the same few batches again and again."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.cycle(self.batches)


class Loaders:
    """Loaders of batches of one size.

    Args:
        num_bytes: of a batch, of float32.
        world_size: ranks that share this host's memory.
    """

    def __init__(self, num_bytes: int, world_size: int) -> None:
        self.num_bytes = num_bytes
        self._world_size = world_size
        numel = max(1, num_bytes // 4)
        self.batches = [torch.full((numel,), n + 1.0) for n in range(NUM_READY)]
        self._pinned: list[Tensor] = []

    def pageable(self) -> _Ready:
        return _Ready(self.batches)

    def pinned(self) -> _Ready:
        """Its batches are made in pinned memory (usual memory on a CPU process)."""
        if not self._pinned:
            self._pinned = [pin(batch) for batch in self.batches]
        return _Ready(self._pinned)

    def workers(self) -> DataLoader[Tensor]:
        """Torch's own: processes that load, and a thread that pins.

        Raises:
            RuntimeError: the host has too little memory to share between processes.
        """
        needed = self.num_bytes * NUM_READY * NUM_WORKERS * self._world_size
        free = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else needed
        if needed > free:
            raise RuntimeError(
                f"{NUM_WORKERS} workers a rank need {needed >> 20} MiB of {_SHARED}, "
                f"{free >> 20} MiB are free"
            )
        return DataLoader(
            self.pageable(),
            batch_size=None,
            num_workers=NUM_WORKERS,
            pin_memory=on_cuda(),
        )


def on_cuda() -> bool:
    return streams.device().type == "cuda"


def pin(batch: Tensor) -> Tensor:
    return batch.pin_memory() if on_cuda() else batch


def _to_device(
    loader: Any, *, non_blocking: bool, pins: bool = False
) -> Iterator[Tensor]:
    device = streams.device()
    for batch in loader:
        yield (pin(batch) if pins else batch).to(device, non_blocking=non_blocking)


def pinned_blocking(loaders: Loaders) -> Iterator[Tensor]:
    """A plain loop: the CPU waits for each copy."""
    return _to_device(loaders.pinned(), non_blocking=False)


def pinned_non_blocking(loaders: Loaders) -> Iterator[Tensor]:
    """The CPU goes on; the copy stands in the compute stream, before the step."""
    return _to_device(loaders.pinned(), non_blocking=True)


def pageable_pinned_here(loaders: Loaders) -> Iterator[Tensor]:
    """The loop pins each batch, then as `pinned_non_blocking`."""
    return _to_device(loaders.pageable(), non_blocking=True, pins=True)


def torch_workers(loaders: Loaders) -> Iterator[Tensor]:
    """DataLoader's workers and pin_memory thread, then as `pinned_non_blocking`."""
    return _to_device(loaders.workers(), non_blocking=True)


def ours_pinned(loaders: Loaders) -> Iterator[Tensor]:
    return iter(BatchPrefetcher(loaders.pinned()))


def ours_pageable(loaders: Loaders) -> Iterator[Tensor]:
    return iter(BatchPrefetcher(loaders.pageable()))


def ours_workers(loaders: Loaders) -> Iterator[Tensor]:
    """Over DataLoader's workers and pin_memory thread."""
    return iter(BatchPrefetcher(loaders.workers()))


# The ways of ours -> the peers that have the same loader.
PEERS = {
    "ours, pinned": ("pinned, blocking", "pinned, non_blocking"),
    "ours, pageable": ("pageable, pinned in the loop",),
    "ours, torch's workers": ("torch's workers",),
}
WAYS: Mapping[str, Callable[[Loaders], Iterator[Tensor]]] = {
    "pinned, blocking": pinned_blocking,
    "pinned, non_blocking": pinned_non_blocking,
    "pageable, pinned in the loop": pageable_pinned_here,
    "torch's workers": torch_workers,
    "ours, pinned": ours_pinned,
    "ours, pageable": ours_pageable,
    "ours, torch's workers": ours_workers,
}


class Compute:
    """A step of about a given length that reads its batch first.

    Args:
        num_ns: how long; less than one matmul is one.
        width: of the matmuls.
    """

    def __init__(self, num_ns: float, width: int) -> None:
        dtype = torch.bfloat16 if on_cuda() else torch.float32
        self._a = torch.full((width, width), 1 / width, dtype=dtype).to(
            streams.device()
        )
        self._out = torch.empty_like(self._a)
        self._read = torch.zeros((), device=streams.device())
        self.repeats = 1
        self.num_ns = num_ns

    def calibrate(self, time_of: Callable[[Callable[[], object]], float]) -> None:
        """Find the number of matmuls.

        Args:
            time_of: ns of a function, the same on all ranks.
        """
        self.repeats = 8
        one_ns = time_of(self._matmuls) / self.repeats
        self.repeats = max(1, round(self.num_ns / one_ns))

    def __call__(self, batch: Tensor) -> None:
        self._read += batch.sum()
        self._matmuls()

    def _matmuls(self) -> None:
        for _ in range(self.repeats):
            torch.mm(self._a, self._a, out=self._out)
