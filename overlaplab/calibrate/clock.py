"""How long something takes on this rank's device, with the launches out of the way.

On CUDA the stream sleeps while the CPU launches, so that what is timed runs back to
back, as it does where a GPU is busy. On a CPU process a call takes as long as it takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from overlaplab import streams

Call = Callable[[], object]

# The stream sleeps this long for each call that the CPU has to launch meanwhile.
_LAUNCH_NS = 250_000
_MOST_NS = 200_000_000


def on_cuda() -> bool:
    return streams.device().type == "cuda"


def sleep(ns: int) -> None:
    """Keep the current stream busy for about `ns`; nothing on a CPU process."""
    if on_cuda():
        spin: Any = torch.cuda._sleep
        spin(ns * 17 // 10)  # cycles, at about 1.7 GHz


def device_ns(
    call: Call, num_calls: int, *, repeats: int = 5, align: Call = lambda: None
) -> int:
    """Median, over `repeats`, of the nanoseconds of one of `num_calls` calls in a row,
    back to back. `align` is launched before the first: a small collective lets ranks
    start together."""
    call()
    found = []
    for _ in range(repeats):
        streams.synchronize()
        sleep(min(num_calls * _LAUNCH_NS, _MOST_NS))
        align()
        first, last = (streams.Event(enable_timing=True) for _ in range(2))
        first.record()
        begin = time.perf_counter_ns()
        for _ in range(num_calls):
            call()
        length = time.perf_counter_ns() - begin
        last.record()
        streams.synchronize()
        if on_cuda():
            length = round(first.elapsed_time(last) * 1e6)
        found.append(length // num_calls)
    return int(statistics.median(found))
