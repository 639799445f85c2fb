"""Marks on streams: CUDA events, or the wall clock where calls return when all is done.

A mark costs about a microsecond and waits for nothing. Knows no spans.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from overlaplab import streams
from overlaplab.errors import ProfileError
from overlaplab.profiling.collectives import future_of, wait_for

Mark = Any  # of the clock that made it
_cuda: Any = torch.cuda


class Clock:
    """What the event mode asks of a device: here of a CPU process, by the wall clock.

    An operator has ended when its call returns.
    """

    def stream_key(self) -> Hashable:
        """The calling thread's current stream."""
        return "cpu"

    def is_silent(self) -> bool:
        """Whether no mark may be made here: the stream is being captured in a graph."""
        return False

    def mark(self, key: Hashable = None) -> Mark:
        """A point on the current stream, or on that of `key`."""
        return [time.time_ns()]

    def is_drained(self) -> bool:
        """Whether the current stream has nothing left to do: the CPU is late."""
        return False  # the CPU is what computes

    def mark_end(self, work: Any, communicator: str) -> Mark:
        """A point that `work`'s end passes; holds up nobody."""
        passed: list[int] = []
        # Works of send and recv have no future; whoever waits for them says so.
        with contextlib.suppress(RuntimeError):
            future_of(work).then(lambda _: passed.append(time.time_ns()))
        return passed

    def open_step(self, mark: Mark) -> None:
        """Later marks are read relative to this one, which keeps them exact."""

    def finish(self) -> None:
        """Wait for every mark: the only wait for the device."""

    def at_ns(self, mark: Mark) -> int | None:
        """After `finish`: nanoseconds of `time.time_ns`; None if it has not passed."""
        return int(mark[0]) if mark else None


class CudaClock(Clock):
    """Timing events. Ends of collectives are recorded on side streams of our own.

    One a communicator, which waits for its collectives in the order of their launches;
    without it the compute stream would have to, and nothing would overlap.

    Raises:
        ProfileError: NCCL's works would block the CPU.
    """

    def __init__(self) -> None:
        for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
            if os.environ.get(name, "0") not in ("", "0"):
                raise ProfileError(
                    f"{name}={os.environ[name]} makes every wait block the CPU, so "
                    "events would change what they measure. Unset it, or leave out "
                    "events=True."
                )
        provider = streams.provider()
        self._read_key: Callable[[], Hashable] = streams.key_reader(provider)
        self._streams: dict[Hashable, Any] = {}  # to make one costs microseconds
        self._sides: dict[str, Any] = {}
        self._bases: list[Any] = []
        self._base_ns: list[int] = []

    def stream_key(self) -> Hashable:
        return self._read_key()

    def is_silent(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self, key: Hashable = None) -> Mark:
        event = _cuda.Event(enable_timing=True)
        event.record(self._stream(key))
        return event, len(self._bases) - 1

    def is_drained(self) -> bool:
        return bool(self._stream().query())

    def mark_end(self, work: Any, communicator: str) -> Mark:
        side = self._sides.get(communicator)
        if side is None:
            side = self._sides[communicator] = _cuda.Stream()
        before = self._stream()
        torch.cuda.set_stream(side)  # half the price of a `with` block
        try:
            wait_for(work)
            event = _cuda.Event(enable_timing=True)
            event.record(side)
        finally:
            torch.cuda.set_stream(before)
        return event, len(self._bases) - 1

    def _stream(self, key: Hashable = None) -> Any:
        key = self._read_key() if key is None else key
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = streams.stream_of(key)
        return stream

    def open_step(self, mark: Mark) -> None:
        self._bases.append(mark[0])

    def finish(self) -> None:
        torch.cuda.synchronize()
        now = _cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        now_ns = time.time_ns()
        from_first = [0]
        for before, after in zip(self._bases, [*self._bases[1:], now], strict=True):
            from_first.append(from_first[-1] + _elapsed_ns(before, after))
        first_ns = now_ns - from_first[-1]
        self._base_ns = [first_ns + ns for ns in from_first[:-1]]

    def at_ns(self, mark: Mark) -> int | None:
        event, base = mark
        base = max(base, 0)
        base_ns: int = self._base_ns[base]
        return base_ns + _elapsed_ns(self._bases[base], event)


def _elapsed_ns(before: Any, after: Any) -> int:
    return 0 if before is after else round(before.elapsed_time(after) * 1e6)
