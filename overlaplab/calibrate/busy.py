"""Whether the machine has other work: what a rank gets of its core and of its GPU.

A core and a GPU that others use, too, are given in slices. So a piece of work that is
done again and again takes as long as ever in some slices, and longer in others; the
share of a rank is what all pieces would take at their best, of what they took. That
needs nobody's permission, and no library of the vendor's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from overlaplab import streams
from overlaplab.calibrate.clock import on_cuda, sleep

_LOOK_NS = 50_000_000  # at the core
_PIECE_NS, _PIECES = 1_000_000, 25  # at the GPU: less than a slice; the first warm up
_WARM = 5


class Shares:
    """What this rank got of its "core" and its "GPU", in looks between the stages."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {"core": []}
        if on_cuda():
            self._seen["GPU"] = []

    def look(self) -> None:
        """Take a look; nothing of this rank's may run."""
        streams.synchronize()
        self._seen["core"].append(cpu_share())
        if "GPU" in self._seen:
            self._seen["GPU"].append(best_share(_gpu_pieces()))

    def means(self) -> dict[str, float]:
        """By what is shared, the mean of all looks."""
        return {what: statistics.mean(seen) for what, seen in self._seen.items()}


def cpu_share() -> float:
    """Of a core, what this thread gets while it wants all."""
    begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
    while (wall := time.perf_counter_ns() - begin) < _LOOK_NS:
        pass
    return (time.thread_time_ns() - begin_cpu) / wall


def best_share(times: Sequence[float]) -> float:
    """What equal pieces would take at their best, of what they took.

    >>> best_share([1.0, 1.0, 3.0, 1.0])
    0.6666666666666666
    """
    return len(times) * min(times) / sum(times)


def _gpu_pieces() -> list[float]:
    """Milliseconds of equal kernels, back to back, that move no data."""
    events = [streams.Event(enable_timing=True) for _ in range(_PIECES + 1)]
    for event in events:
        event.record()
        sleep(_PIECE_NS)
    streams.synchronize()
    pairs = zip(events[_WARM:], events[_WARM + 1 :], strict=False)
    return [begin.elapsed_time(end) for begin, end in pairs]
