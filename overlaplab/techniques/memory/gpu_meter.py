"""The meter of a GPU: CUDA's counters of memory, and events behind a full queue."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from overlaplab import streams
from overlaplab.techniques.memory.meters import no_collection

_PARTS = 5  # the median is of so many
_MOST_STEPS = 50  # of a part
_STEPS_IN_QUEUE = 6  # CUDA's queue has room for about a thousand kernels
_HEATING_NS = 20_000_000
_BUSY_SIZE, _BUSY_NS = 6144, 500_000  # of a matmul in bfloat16, at about 1 PFLOP/s


def keep_busy(ns: int) -> None:
    """Give the current GPU matmuls for at least about `ns`.

    A delay kernel would let it cool, and what comes behind it would find a higher clock
    than a step does that is computing all the time.
    """
    left = torch.randn(_BUSY_SIZE, _BUSY_SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)
    for _ in range(-(-ns // _BUSY_NS)):
        torch.mm(left, left, out=out)


class GpuMeter:
    """CUDA's memory counters, which are exact at any moment, and its events.

    Args:
        target_ns: about how long a function is repeated for its time, in all.
        warmup: calls before.
    """

    computes = True
    _BLOCK_BYTES = 512  # of the caching allocator

    def __init__(self, target_ns: int = 250_000_000, warmup: int = 3) -> None:
        self._target_ns = target_ns
        self._warmup = warmup
        self._base_bytes = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        gc.collect()  # the counters know all memory, garbage included
        with no_collection():
            self._base_bytes = torch.cuda.memory_allocated()
            self.mark()
            yield

    def adopt(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated() - self._base_bytes

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._base_bytes

    def mark(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def step_ns(self, step: Callable[[], object]) -> int:
        """Of the GPU alone: the CPU is kept ahead of it, as it is in a long step.

        A step that the CPU cannot launch as fast as the GPU computes takes longer.
        """
        for _ in range(self._warmup):
            step()
        streams.synchronize()
        start = time.perf_counter_ns()
        for _ in range(2):
            step()
        launch_ns = (time.perf_counter_ns() - start) // 2
        once = self._elapsed_ns(step, 2, 4 * launch_ns) / 2
        part = int(min(_MOST_STEPS, max(2, self._target_ns / _PARTS // max(once, 1))))
        if launch_ns > 0.8 * once:  # all of them have to wait in the queue
            part = min(part, _STEPS_IN_QUEUE)
        # The GPU may begin when the CPU needs no more for the rest than it does itself.
        ahead_ns = 2 * launch_ns + int(part * max(0, launch_ns - once))
        ahead_ns = max(_HEATING_NS, ahead_ns)
        parts = [self._elapsed_ns(step, part, ahead_ns) for _ in range(_PARTS)]
        return int(statistics.median(parts) / part)

    def _elapsed_ns(
        self, step: Callable[[], object], repeats: int, ahead_ns: int
    ) -> int:
        streams.synchronize()
        keep_busy(ahead_ns)
        start, end = (streams.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._BLOCK_BYTES) * self._BLOCK_BYTES

    def workspace_bytes(self) -> int:
        """Gives cuBLAS's workspaces back and looks how much that was."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        return int(before - torch.cuda.memory_allocated())
