"""Exercises 3.5 and 3.6: how many streams are enough, and what a stream's synchronize
does not wait for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.violation import Violation, ms
from overlaplab.timeline import Timeline
from overlaplab_course.lab03.jobs import COMPUTE, INPUT, LOAD, WIRE, Job, Piece
from overlaplab_course.lab03.play import (
    NUM_RANKS,
    SET_UP,
    SLOW,
    WIDTH,
    Played,
    Task,
    by_label,
    compute,
    play,
)

MOST_STREAMS = 6
KINDS = ("kernels", "one chain", "batches")
FEWEST = "each is the fewest streams within 1 % of the shortest step"

SAFE = "the CPU reads the sum only when it is there"
WAITED = "the CPU goes on when the collective has ended, and not before"
NO_MORE = "the CPU does not wait for other streams' work"


# -- how many streams are enough?


def chains(kind: str) -> Job:
    """Six chains of three pieces: "kernels", "one chain" or "batches"."""
    if kind not in KINDS:
        raise ValueError(f"no job {kind!r}; expected one of {', '.join(KINDS)}")
    pieces = []
    for chain in range(1, 7):
        source: tuple[str, ...] = (INPUT,)
        if kind == "one chain" and chain > 1:
            source = (f"send {chain - 1}",)
        engines = (LOAD, COMPUTE, WIRE) if kind != "kernels" else 3 * (COMPUTE,)
        for name, on, length in zip(
            ("load", "work", "send"), engines, (2, 3, 2), strict=True
        ):
            reads = () if on == LOAD and kind == "batches" else source
            pieces.append(
                Piece(f"{name} {chain}", on, length, reads, f"{name} {chain}")
            )
            source = (f"{name} {chain}",)
    return Job(kind, tuple(pieces))


@dataclass(frozen=True)
class OnStreams:
    """Chain i on stream i mod `number`; an event where one needs another stream's."""

    number: int

    def __call__(self, tasks: Iterable[Task]) -> None:
        caller = streams.current_stream()
        side = [streams.Stream() for _ in range(self.number)]
        for stream in side:
            stream.wait_stream(caller)
        ended: dict[str, tuple[int, Any]] = {}
        for task in tasks:
            own = int(task.name.split()[1]) % self.number
            for need in task.needs:
                if ended[need][0] != own:
                    side[own].wait_event(ended[need][1])
            with streams.stream(side[own]):
                task.run()
            ended[task.name] = own, side[own].record_event()
        for stream in side:
            caller.wait_stream(stream)


@lru_cache(maxsize=32)
def on_streams(kind: str, number: int) -> Played:
    """The job `kind` on `number` streams."""
    return play(chains(kind), OnStreams(number))


def steps_ms(kind: str) -> dict[int, float]:
    """The step in ms on 1 to 6 streams."""
    return {
        number: on_streams(kind, number).step_ns / 1e6
        for number in range(1, MOST_STREAMS + 1)
    }


@exercise(
    "3.5",
    title="how many streams are enough",
    solution="enough",
    verifies=(FEWEST,),
    points=1,
    optional=True,
    timeout_s=60.0,
)
def grade_enough(sheet: Sheet, enough: Mapping[str, int]) -> None:
    """Compare with a sweep from 1 to 6 streams."""
    sheet.ran(f"each job on 1 to {MOST_STREAMS} streams")
    if not isinstance(enough, Mapping):
        raise TypeError(f"enough is {type(enough).__name__}; expected a dict")
    wrong = []
    for kind in KINDS:
        steps = steps_ms(kind)
        fewest = min(
            n for n, step in steps.items() if step <= 1.01 * min(steps.values())
        )
        if enough.get(kind) != fewest:
            wrong.append(
                Violation(
                    "regret",
                    f"{kind}: {enough.get(kind)!r} streams",
                    "the fewest whose step no other number beats by more than 1 %",
                    "count the engines that can work at once, then sweep",
                )
            )
    sheet.verify(FEWEST, wrong, list_all=True)


# -- what a stream's synchronize does not wait for


@dataclass(frozen=True, slots=True)
class Finished:
    """A run in which the CPU had to wait for one collective.

    Args:
        run: what the virtual cluster recorded.
    """

    run: Run

    @property
    def timeline(self) -> Timeline:
        """Rank 0, the pieces' names on the spans."""
        return by_label(self.run.timeline).of_rank(0)

    @property
    def sum_ns(self) -> int:
        """When the collective has ended on rank 0."""
        return max(
            s.end_ns
            for s in self.run.timeline.spans
            if s.rank == 0 and s.kind == "communication"
        )

    @property
    def cpu_ns(self) -> int:
        """When `finish` returned on rank 0."""
        ends = [
            s.end_ns
            for s in self.run.timeline.spans
            if s.rank == 0 and s.lane == "cpu" and s.attributes.get("label") == "finish"
        ]
        return max(ends, default=0)


Finish = Callable[[Any, Any], object]


def finish_with(number: int, finish: Finish) -> Finished:
    """Launch an all-reduce under a side stream, call `finish(side, work)`, then read.

    The current stream has long work of its own; the number draws how long all take.
    """
    return Finished(
        run(_collective, number, finish, world_size=NUM_RANKS, hardware=SLOW)
    )


def _collective(number: int, finish: Finish) -> float:
    draw = random.Random(23 * int(number) + 1)
    make_ms, sum_ms, other_ms = draw.choice((1, 2)), draw.choice((3, 4, 5)), 12
    with streams.annotate(SET_UP):
        start = torch.full((WIDTH, WIDTH), 1.0 + dist.get_rank())
        tensor = torch.zeros(WIDTH * sum_ms, WIDTH, device=streams.device())
        other = torch.zeros(WIDTH, WIDTH, device=streams.device())
        streams.name_tensor(tensor, "sum")
        streams.synchronize()
    side = streams.Stream()
    with streams.annotate("other work"):
        compute([start], other, other_ms)
    with streams.stream(side):
        with streams.annotate("make"):
            compute([start], tensor[:WIDTH], make_ms)
        with streams.annotate("sum"):
            work = dist.all_reduce(tensor, async_op=True)
    with streams.annotate("finish"):
        finish(side, work)
    with streams.annotate("read"), streams.stream(streams.Stream()):
        return float(tensor[0, 0].item())


@exercise(
    "3.6",
    title="what synchronize does not wait for",
    solution=("my_number", "finish"),
    verifies=(SAFE, WAITED, NO_MORE),
    points=1,
    optional=True,
    timeout_s=30.0,
)
def grade_finish(sheet: Sheet, my_number: int, finish: Finish) -> None:
    """The CPU goes on at the end of the collective: not before, not much later."""
    sheet.ran(f"one all-reduce beside other work, sizes of number {my_number}, 2 ranks")
    seen = finish_with(my_number, finish)
    sheet.show(seen.timeline, title="your run")
    sheet.verify(SAFE, laws.no_findings_law(seen.run.warnings))
    told = (
        f"the CPU went on at {ms(seen.cpu_ns)}, the sum was there at {ms(seen.sum_ns)}"
    )
    sheet.expect(
        WAITED,
        seen.cpu_ns >= seen.sum_ns,
        seen=told,
        expected="the CPU goes on after the sum",
        hint="the collective is on a stream of its communicator's: what puts the side "
        "stream behind it?",
    )
    sheet.expect(
        NO_MORE,
        seen.cpu_ns <= 1.02 * seen.sum_ns,
        seen=told,
        expected="within 2 %",
        hint="which stream is current when you call wait(), and what else is on it?",
    )
