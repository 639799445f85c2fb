"""Programs of a few launches on two streams: what exercise 0.1 schedules.

A program is data; `as_program` makes a record of it that `ol.resolve` times. The
learner's number draws the six launches of the lesson: those on which each rule counts,
which `resolved` shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from overlaplab.hardware import find_hardware
from overlaplab.program import Program, ProgramBuilder, resolve
from overlaplab.view import Table

Reason = Literal["launch", "stream", "wait", "sync"]

CPU = "cpu"
STREAMS = ("default", "copy")
NUM_LAUNCHES = 6
LAUNCH_US = 10  # of the lesson's GPU
_NS_PER_US = 1000
_COPY_BYTES_PER_US = find_hardware("chalk").host_bytes_per_s // 10**6


class Launch(NamedTuple):
    """One line of a program.

    Args:
        name: of the operator.
        stream: "default" (kernels), "copy" (copies of batches), or "cpu": a host sync,
            which launches nothing.
        duration_us: how long it runs on the GPU; 0 for a host sync.
        waits: positions of earlier lines that must have ended; those that a host sync
            holds the CPU for.
    """

    name: str
    stream: str
    duration_us: int
    waits: tuple[int, ...] = ()


class Launches(list[Launch]):
    """Lines of a program; prints as a table."""

    def __repr__(self) -> str:
        rows = [("", "name", "stream", "takes", "waits for")]
        for position, (name, stream, duration_us, waits) in enumerate(self):
            takes = "-" if stream == CPU else f"{duration_us} us"
            after = ", ".join(map(str, waits)) or "-"
            rows.append((str(position), name, stream, takes, after))
        return str(Table(rows[0], tuple(rows[1:]), left=5))


class Products(NamedTuple):
    """Equal products, launched one after the other; prints as a sentence."""

    number: int
    each_us: int

    def __str__(self) -> str:
        return (
            f"{self.number} products; each takes {LAUNCH_US} us of the CPU to launch, "
            f"and {self.each_us} us of the GPU"
        )


class Row(NamedTuple):
    """When one line starts and ends, and what held it until then."""

    # start_us, end_us: when; for a host sync, of the CPU's wait
    start_us: int
    end_us: int
    # every rule without which it would start earlier; two may say the same
    reasons: tuple[Reason, ...]

    @property
    def reason(self) -> Reason:
        return self.reasons[0]


def as_program(launches: Sequence[Launch]) -> Program:
    """The record of these lines: what the virtual cluster would have written."""
    builder = ProgramBuilder()
    for name, stream, duration_us, waits in launches:
        if stream == CPU:
            builder.host_wait(0, after=waits, name=name)
        elif stream == "copy":
            size = duration_us * _COPY_BYTES_PER_US
            builder.copy(0, "h2d", bytes=size, stream=stream, name=name, after=waits)
        else:
            ns = duration_us * _NS_PER_US
            builder.compute(0, name, ns=ns, stream=stream, after=waits)
    return builder.build()


def resolved(launches: Sequence[Launch], launch_us: int) -> list[Row]:
    """The truth, by `ol.resolve`, each row with what held it."""
    chalk = replace(find_hardware("chalk"), launch_ns=launch_us * _NS_PER_US)
    times = {
        span.attributes["op"]: (span.start_ns // _NS_PER_US, span.end_ns // _NS_PER_US)
        for span in resolve(as_program(launches), chalk).spans
        if span.kind != "launch"
    }
    rows: list[Row] = []
    cpu_us, stream_us = 0, dict.fromkeys(STREAMS, 0)
    for position, (_, stream, _, waits) in enumerate(launches):
        if stream == CPU:  # a sync that holds nobody has no span
            start_us, cpu_us = times.get(position, (cpu_us, cpu_us))
            rows.append(Row(start_us, cpu_us, ("sync",)))
            continue
        cpu_us += launch_us
        start_us, end_us = times[position]
        waited_us = max((rows[w].end_us for w in waits), default=0)
        held: dict[Reason, int] = {
            "launch": cpu_us, "stream": stream_us[stream], "wait": waited_us
        }  # fmt: skip
        reasons = tuple(rule for rule, until_us in held.items() if until_us == start_us)
        rows.append(Row(start_us, end_us, reasons))
        stream_us[stream] = end_us
    return rows


def draw(
    generator: random.Random,
    num_lines: int,
    durations_us: Sequence[int] = range(3, 60),
) -> Launches:
    """Random lines, at most two waits each."""
    lines = Launches()
    count = dict.fromkeys(STREAMS, 0)
    for position in range(num_lines):
        earlier = [i for i in range(position) if lines[i].stream != CPU]
        drawn = generator.choices(range(position), k=2) if position else []
        waits = {w for w in drawn if w in earlier and generator.random() < 0.35}
        if position and generator.random() < 0.15:
            lines.append(Launch("item", CPU, 0, tuple(earlier[-1:])))
            continue
        stream = generator.choices(STREAMS, weights=(2, 1))[0]
        count[stream] += 1
        name = f"copy {count[stream]}" if stream == "copy" else f"mm {count[stream]}"
        duration_us = generator.choice(durations_us)
        lines.append(Launch(name, stream, duration_us, tuple(sorted(waits))))
    return lines


@lru_cache(maxsize=64)
def _own(number: int) -> Launches:
    generator = random.Random(number)
    while True:
        lines = draw(generator, NUM_LAUNCHES + 1, range(10, 65, 5))
        if _is_worth_it(lines):
            return lines


def _is_worth_it(lines: Launches) -> bool:
    """Every rule decides somewhere, and what comes after the sync depends on it."""
    syncs = [i for i, line in enumerate(lines) if line.stream == CPU]
    if len(syncs) != 1 or not 3 <= syncs[0] <= NUM_LAUNCHES - 1:
        return False
    (sync,) = syncs
    rows = resolved(lines, LAUNCH_US)
    decisive = [row.reason if len(row.reasons) == 1 else "" for row in rows]
    return (
        rows[sync].end_us - rows[sync].start_us > LAUNCH_US
        and {"launch", "stream", "wait"} <= set(decisive)
        and "launch" in decisive[:sync]
        and "launch" in decisive[sync + 1 :]
        and {line.stream for line in lines[:sync]} == set(STREAMS)
    )


def own_products(number: int) -> Products:
    """The products that belong to a learner's number: the CPU gains a lead."""
    generator = random.Random(int(number))
    return Products(generator.randrange(4, 10), generator.randrange(20, 65, 5))


def six_launches(number: int) -> Launches:
    """The six launches that belong to a learner's number, and one host sync."""
    return Launches(_own(int(number)))
