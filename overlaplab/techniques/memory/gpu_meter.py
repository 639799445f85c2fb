"""The meter of a GPU: CUDA's counters of memory, and events behind a full queue.

[Note: what the allocator adds]
CUDA's caching allocator cuts a tensor of more than 1 MiB out of a larger piece only if
more than 1 MiB is left; else the tensor gets all of it, and all of it counts as
allocated (`should_split` of CUDACachingAllocator.cpp). New pieces are multiples of
2 MiB: a tensor of 49 MiB has one of 50, while its like that was cut out of 196 has 49.
So where sizes are multiples of 2 MiB nothing is ever added; where not, a block alone
and the same block in a step may differ, by up to 1 MiB a tensor. Then what programs
asked for is counted, and that much for each tensor: a bound. With
`expandable_segments:True` in `PYTORCH_CUDA_ALLOC_CONF` pieces are cut exactly, and
nothing is added.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from overlaplab import streams
from overlaplab.program.garbage import no_collections

_PARTS = 5  # the median is of so many
_MOST_STEPS = 50  # of a part
_STEPS_IN_QUEUE = 6  # CUDA's queue has room for about a thousand kernels
_HEATING_NS = 20_000_000
_BLOCK_BYTES = 512  # the allocator's least, of whose multiples all sizes are
_LARGE_BYTES = 2**20  # up to here memory is cut exactly
_PIECE_BYTES = 2 * 2**20  # of whose multiples it takes memory from the device
_BUSY_SIZE, _BUSY_NS = 6144, 500_000  # of a matmul in bfloat16, at about 1 PFLOP/s


def keep_busy(ns: int) -> None:
    """Give the current GPU matmuls for at least about `ns`.

    A delay kernel would let it cool, and what comes behind it would find a higher clock
    than a step does that is computing all the time. (Products of large matrices take
    more power than most steps: steps that keep a GPU busy are their own warming.)
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

    def __init__(self, target_ns: int = 250_000_000, warmup: int = 3) -> None:
        self._target_ns = target_ns
        self._warmup = warmup
        self.launch_ns = 0
        self._added_bytes = 0  # to a large tensor, at most
        self._added_before_bytes = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        gc.collect()  # the counters know all memory, garbage included
        torch.cuda.empty_cache()  # pieces that others left, of whatever sizes
        with no_collections():
            self._added_before_bytes = _added_to_all()
            self.mark()
            yield

    def settle(self) -> str:
        """See [Note: what the allocator adds]."""
        segments = [
            segment
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["segment_type"] == "large"
        ]
        if any(segment.get("is_expandable") for segment in segments):
            return ""
        peak_bytes = torch.cuda.memory_stats()["requested_bytes.large_pool.peak"]
        sizes = [
            block.get("requested_size") or block["size"]
            for segment in segments
            for block in segment["blocks"]
        ]
        if not any(num_bytes % _PIECE_BYTES for num_bytes in (peak_bytes, *sizes)):
            return ""
        self._added_bytes = _LARGE_BYTES + _BLOCK_BYTES
        return (
            "sizes are no multiples of 2 MiB: CUDA's allocator may add up to 1 MiB to "
            "each tensor of more than 1 MiB, and peaks count that in full. With "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it adds nothing"
        )

    def adopt(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    def live_bytes(self) -> int:
        return self._bytes("current")

    def peak_bytes(self) -> int:
        return self._bytes("peak")

    def _bytes(self, when: str) -> int:
        stats = torch.cuda.memory_stats()
        if not self._added_bytes:
            return int(stats[f"allocated_bytes.all.{when}"])
        small = int(stats[f"allocated_bytes.small_pool.{when}"])
        large = int(stats[f"requested_bytes.large_pool.{when}"])
        count = int(stats[f"allocation.large_pool.{when}"])
        return small + large + count * self._added_bytes

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
        busy = functools.partial(keep_busy, 4 * launch_ns)
        once = self._elapsed_ns(step, 2, busy) / 2
        part = int(min(_MOST_STEPS, max(2, self._target_ns / _PARTS // max(once, 1))))
        if launch_ns > 0.8 * once:  # all of them have to wait in the queue
            part = min(part, _STEPS_IN_QUEUE)
            # The GPU may begin when the CPU needs no more for the rest than it does.
            ahead_ns = 2 * launch_ns + int(part * max(0, launch_ns - once))
            ahead = functools.partial(keep_busy, max(_HEATING_NS, ahead_ns))
        else:  # the CPU gets ahead by itself, and the GPU as warm as such steps make it
            ahead = functools.partial(_repeat, step, math.ceil(_HEATING_NS / once))
        parts = [self._elapsed_ns(step, part, ahead) for _ in range(_PARTS)]
        self.launch_ns = launch_ns
        return int(statistics.median(parts) / part)

    def _elapsed_ns(
        self, step: Callable[[], object], repeats: int, ahead: Callable[[], None]
    ) -> int:
        streams.synchronize()
        ahead()
        start, end = (streams.Event(enable_timing=True) for _ in range(2))
        start.record()
        _repeat(step, repeats)
        end.record()
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)

    def rounded(self, num_bytes: int) -> int:
        whole = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        return whole + self._added_bytes if num_bytes > _LARGE_BYTES else whole

    def workspace_bytes(self) -> int:
        """Gives cuBLAS's workspaces back and looks how much that was.

        With it what the allocator added to tensors that were there before.
        """
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = int(before - torch.cuda.memory_allocated())
        return workspaces + (self._added_before_bytes if self._added_bytes else 0)


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def _added_to_all() -> int:
    """To large tensors that live."""
    stats = torch.cuda.memory_stats()
    allocated = int(stats["allocated_bytes.large_pool.current"])
    return allocated - int(stats["requested_bytes.large_pool.current"])
