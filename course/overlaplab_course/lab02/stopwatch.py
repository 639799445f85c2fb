"""Clocks and timing events on the virtual cluster, for programs that time themselves.

Times are known only when a run is over. So a program that reads a clock is run again,
with the times of the run before, until it reads the times that it had. A program whose
launches do not hang on what it reads needs two runs.

Knows no exercise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.virtual.streams import VirtualEvent, VirtualProvider
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware
from overlaplab.timeline import CPU_LANE, Timeline
from overlaplab_course.lab00.given import GPU

# Lab 00's round numbers, 64 times slower at products: those of 64 x 64, which a laptop
# computes at once, take as long as its GPU's of 256 x 256.
SLOW_GPU: Hardware = replace(
    GPU,
    name="chalk, 10 us a launch, slow products",
    flops_per_s={"default": GPU.flops_per_s["default"] // 64},
)
MOST_RUNS = 6
GUESS_MS = 0.01  # between two readings, while nobody knows: a launch


# A point of a rank's program: how many operators it had recorded by then, and which its
# stream must have ended. The CPU's clock waits for none.
Moment = tuple[int, frozenset[int]]


class Timed(NamedTuple):
    """What a program that times itself returned on rank 0, and what happened."""

    value: Any
    timeline: Timeline


def clock() -> float:
    """The CPU's clock in ms, as `1e3 * time.perf_counter()` on a real machine.

    Raises:
        RuntimeError: outside of a timed run.
    """
    provider = streams.thread_provider()
    if not isinstance(provider, _TimedProvider):
        raise RuntimeError(
            "lab.clock() is the clock of the virtual machine: read it inside a "
            "function that the lab runs (lab.time_with, check)"
        )
    return provider.now_ms()


def run_timed(program: Callable[..., Any], *args: Any, world_size: int = 2) -> Timed:
    """Run `program(*args)` on every rank; its clocks and timing events have times.

    Raises:
        RuntimeError: it launches other work each time that its times change.
    """
    before: list[list[float]] | None = None
    for _ in range(MOST_RUNS):
        how: dict[str, Any] = {"world_size": world_size, "hardware": SLOW_GPU}
        done = run(_on_rank, program, args, before, check=False, **how)
        times = [
            _times_ms(done.timeline, rank, moments)
            for rank, (_, moments) in enumerate(done.values)
        ]
        if times == before:
            return Timed(done.values[0][0], done.timeline)
        before = times
    raise RuntimeError(
        f"after {MOST_RUNS} runs the program still launches other work each time that "
        "its clocks change: let what it launches not hang on measured times"
    )


def _on_rank(
    program: Callable[..., Any], args: tuple[Any, ...], before: list[list[float]] | None
) -> tuple[Any, list[Moment]]:
    """One rank, with a provider whose events have times."""
    provider = streams.thread_provider()
    assert isinstance(provider, VirtualProvider)
    own = None if before is None else before[dist.get_rank()]
    timed = _TimedProvider(provider, own)
    streams.install_thread_provider(timed)
    try:
        return program(*args), timed.moments
    finally:
        streams.install_thread_provider(provider)


class _TimedProvider(VirtualProvider):
    """A rank's provider whose moments have the times of the run before, if any, in ms.

    With times it refuses to read an event that the CPU has not waited for, as CUDA.
    """

    def __init__(self, inner: VirtualProvider, times_ms: list[float] | None) -> None:
        super().__init__(inner._recorder)
        self._streams = inner._streams
        self.moments: list[Moment] = []
        self._times_ms = times_ms or []
        self.strict = times_ms is not None

    def make_event(self, enable_timing: bool) -> VirtualEvent:
        return _TimedEvent(self, enable_timing)

    def now_ms(self) -> float:
        """The CPU's clock; reading it is a moment."""
        return self.time_of(self.add())

    def add(self, after: frozenset[int] = frozenset()) -> int:
        """Note a moment; returns its number."""
        self.moments.append((len(self._recorder.ops), after))
        return len(self.moments) - 1

    def time_of(self, number: int) -> float:
        """Its time; a guess if the run before did not come here."""
        known = self._times_ms
        if number < len(known):
            return known[number]
        return (known[-1] if known else 0.0) + GUESS_MS * (number - len(known) + 1)


class _TimedEvent(VirtualEvent):
    """An event with a time, and with CUDA's complaints."""

    def __init__(self, provider: _TimedProvider, enable_timing: bool) -> None:
        super().__init__(provider._recorder)
        self._provider = provider
        self._timing = enable_timing
        self._number: int | None = None

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        frontier = self._recorded
        self._number = self._provider.add(frontier.ops if frontier else frozenset())

    def elapsed_time(self, end_event: VirtualEvent) -> float:
        """Milliseconds from this event to `end_event`.

        Raises:
            RuntimeError: as torch.cuda.Event: made without timing, never recorded, or
                not known by the CPU to have happened.
        """
        assert isinstance(end_event, _TimedEvent)
        pair = (self, end_event)
        if not all(event._timing for event in pair):
            raise RuntimeError(
                "both events must be made with Event(enable_timing=True) to have a time"
            )
        if any(event._number is None for event in pair):
            raise RuntimeError("both events must be recorded before they have a time")
        asked_ms = self._provider.now_ms()
        start_ms, end_ms = (self._provider.time_of(e._number or 0) for e in pair)
        if self._provider.strict and max(start_ms, end_ms) > asked_ms:
            raise RuntimeError(
                "an event has not happened yet when its time is asked for: the CPU "
                "must wait for it first (event.synchronize(), streams.synchronize())"
            )
        return end_ms - start_ms


def _times_ms(timeline: Timeline, rank: int, moments: Sequence[Moment]) -> list[float]:
    """When each moment was: its CPU's time, and for an event the stream's too."""
    own = [s for s in timeline.spans if s.rank == rank and "op" in s.attributes]
    ended_ns = {s.attributes["op"]: s.end_ns for s in own if s.lane != CPU_LANE}
    # The CPU works through its operators in order, so its ends ascend.
    cpu = sorted((s.attributes["op"], s.end_ns) for s in own if s.lane == CPU_LANE)
    times = []
    for num_ops, after in moments:
        begun = bisect_left(cpu, (num_ops, 0))
        cpu_ns = cpu[begun - 1][1] if begun else 0
        times.append(max([cpu_ns, *(ended_ns[op] for op in after)]) / 1e6)
    return times
