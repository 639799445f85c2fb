"""Clocks and timing events on the virtual cluster, for programs that time themselves.

Times are known only when a run is over. So a program that reads a clock is run again,
with the times of the run before, until it reads what it was told. A program whose
launches do not hang on what it reads needs two runs.

Knows no exercise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run, run
from overlaplab.cluster.virtual.recorder import Frontier
from overlaplab.cluster.virtual.streams import VirtualEvent, VirtualProvider
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


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of one rank's program: of its CPU, or of a stream.

    Args:
        kind: "clock" is read by the CPU; "event" is reached by a stream; "asked" is
            when the CPU asks an event for its time.
        num_ops: operators that the rank had recorded by then.
        after: operators that the stream must have finished.
    """

    kind: Literal["clock", "event", "asked"]
    num_ops: int
    after: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Timed:
    """What a program that times itself returned, and what happened.

    Args:
        value: of rank 0.
        run: on the virtual cluster.
    """

    value: Any
    run: Run

    @property
    def timeline(self) -> Timeline:
        return self.run.timeline


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
    return provider.read_clock()


def run_timed(
    program: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    hardware: Hardware = SLOW_GPU,
) -> Timed:
    """Run `program(*args)` on every rank; its clocks and timing events have times.

    Raises:
        RuntimeError: it launches other work each time that its times change.
    """
    told: list[tuple[float, ...]] = [() for _ in range(world_size)]
    for attempt in range(MOST_RUNS):
        done = run(
            _on_rank,
            program,
            args,
            told,
            attempt > 0,
            world_size=world_size,
            hardware=hardware,
            check=False,
        )
        times = [
            _times_ms(done.timeline, rank, moments)
            for rank, (_, moments) in enumerate(done.values)
        ]
        if times == told and attempt > 0:
            return Timed(done.values[0][0], done)
        told = times
    raise RuntimeError(
        f"after {MOST_RUNS} runs the program still launches other work each time that "
        "its clocks change: let what it launches not hang on measured times"
    )


def _on_rank(
    program: Callable[..., Any],
    args: tuple[Any, ...],
    told: list[tuple[float, ...]],
    final: bool,
) -> tuple[Any, list[Moment]]:
    """One rank: its provider gives events that have times."""
    provider = streams.thread_provider()
    assert isinstance(provider, VirtualProvider)
    timed = _TimedProvider(provider, told[dist.get_rank()], strict=final)
    streams.install_thread_provider(timed)
    try:
        return program(*args), timed.moments
    finally:
        streams.install_thread_provider(provider)


class _TimedProvider(VirtualProvider):
    """A rank's provider whose moments have the times of the run before.

    Args:
        told: the times of those moments, in ms.
        strict: refuse to read an event that the CPU has not waited for, as CUDA does.
    """

    def __init__(
        self, inner: VirtualProvider, told: tuple[float, ...], *, strict: bool
    ) -> None:
        super().__init__(inner._recorder)
        self._streams = inner._streams
        self.moments: list[Moment] = []
        self._told = told
        self.strict = strict

    def make_event(self, enable_timing: bool) -> VirtualEvent:
        return _TimedEvent(self, enable_timing)

    def read_clock(self) -> float:
        return self.time_of(self.add("clock"))

    def add(
        self, kind: Literal["clock", "event", "asked"], frontier: Frontier | None = None
    ) -> int:
        """Note a moment; returns its number."""
        after = frozenset() if frontier is None else frontier.ops
        self.moments.append(Moment(kind, len(self._recorder.ops), after))
        return len(self.moments) - 1

    def time_of(self, number: int) -> float:
        """Its time in ms; a guess if the run before did not come here."""
        if number < len(self._told):
            return self._told[number]
        last_ms = self._told[-1] if self._told else 0.0
        return last_ms + GUESS_MS * (number - len(self._told) + 1)


class _TimedEvent(VirtualEvent):
    """An event with a time, and with CUDA's complaints."""

    def __init__(self, provider: _TimedProvider, enable_timing: bool) -> None:
        super().__init__(provider._recorder)
        self._provider = provider
        self._timing = enable_timing
        self._number: int | None = None

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self._number = self._provider.add("event", self._recorded)

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
        asked_ms = self._provider.time_of(self._provider.add("asked"))
        start_ms, end_ms = (self._provider.time_of(e._number or 0) for e in pair)
        if self._provider.strict and max(start_ms, end_ms) > asked_ms:
            raise RuntimeError(
                "an event has not happened yet when its time is asked for: the CPU "
                "must wait for it first (event.synchronize(), streams.synchronize())"
            )
        return end_ms - start_ms


def _times_ms(
    timeline: Timeline, rank: int, moments: Sequence[Moment]
) -> tuple[float, ...]:
    """When each moment was: its CPU's time, and for an event the stream's too."""
    own = [s for s in timeline.spans if s.rank == rank and "op" in s.attributes]
    ended_ns = {s.attributes["op"]: s.end_ns for s in own if s.lane != CPU_LANE}
    # The CPU works through its operators in order, so its ends ascend.
    cpu = sorted((s.attributes["op"], s.end_ns) for s in own if s.lane == CPU_LANE)
    ops = [op for op, _ in cpu]
    times = []
    for moment in moments:
        before = bisect_left(ops, moment.num_ops)
        cpu_ns = cpu[before - 1][1] if before else 0
        stream_ns = max((ended_ns[op] for op in moment.after), default=0)
        times.append(max(cpu_ns, stream_ns) / 1e6)
    return tuple(times)
