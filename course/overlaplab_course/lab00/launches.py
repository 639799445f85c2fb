"""Programs of a few launches on two streams: what exercise 0.1 schedules.

A program is data; `as_program` makes a record of it that `ol.resolve` times. The
learner's number draws the six launches of the lesson.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from overlaplab.hardware import find_hardware
from overlaplab.program import Program, ProgramBuilder, resolve

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
        for position, line in enumerate(self):
            takes = "-" if line.stream == CPU else f"{line.duration_us} us"
            waits = ", ".join(str(w) for w in line.waits) or "-"
            rows.append((str(position), line.name, line.stream, takes, waits))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join(
            "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


class Row(NamedTuple):
    """When one line starts and ends, and what held it until then."""

    start_us: int
    end_us: int
    reason: Reason


def as_program(launches: Sequence[Launch]) -> Program:
    """The record of these lines: what the virtual cluster would have written."""
    builder = ProgramBuilder()
    for line in launches:
        if line.stream == CPU:
            builder.host_wait(0, after=line.waits, name=line.name)
        elif line.stream == "copy":
            moved = line.duration_us * _COPY_BYTES_PER_US
            builder.copy(
                0, "h2d", bytes=moved, stream="copy", name=line.name, after=line.waits
            )
        else:
            builder.compute(
                0,
                line.name,
                ns=line.duration_us * _NS_PER_US,
                stream=line.stream,
                after=line.waits,
            )
    return builder.build()


def resolved(launches: Sequence[Launch], launch_us: int) -> list[Row]:
    """The truth, by `ol.resolve`, each row with what held it."""
    chalk = replace(find_hardware("chalk"), launch_ns=launch_us * _NS_PER_US)
    spans = resolve(as_program(launches), chalk).spans
    times = {
        span.attributes["op"]: (span.start_ns // _NS_PER_US, span.end_ns // _NS_PER_US)
        for span in spans
        if span.kind != "launch"
    }
    rows: list[Row] = []
    cpu_us = 0
    stream_us = dict.fromkeys(STREAMS, 0)
    for position, line in enumerate(launches):
        waited_us = max((rows[w].end_us for w in line.waits), default=0)
        if line.stream == CPU:
            # A sync that holds nobody has no span.
            start_us, end_us = times.get(position, (cpu_us, cpu_us))
            rows.append(Row(start_us, end_us, "sync"))
            cpu_us = end_us
            continue
        cpu_us += launch_us
        start_us, end_us = times[position]
        reason: Reason = "launch"
        if start_us > cpu_us:
            reason = "stream" if start_us == stream_us[line.stream] else "wait"
        if start_us == waited_us > max(cpu_us, stream_us[line.stream]):
            reason = "wait"
        rows.append(Row(start_us, end_us, reason))
        stream_us[line.stream] = end_us
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
        waits = tuple(
            sorted(
                {
                    w
                    for w in generator.choices(range(position), k=2)
                    if lines[w].stream != CPU and generator.random() < 0.35
                }
            )
            if position
            else ()
        )
        if position and generator.random() < 0.15:
            last = [w for w in range(position) if lines[w].stream != CPU]
            lines.append(Launch("item", CPU, 0, tuple(last[-1:])))
            continue
        stream = generator.choices(STREAMS, weights=(2, 1))[0]
        count[stream] += 1
        name = f"copy {count[stream]}" if stream == "copy" else f"mm {count[stream]}"
        lines.append(Launch(name, stream, generator.choice(durations_us), waits))
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
    rows = resolved(lines, LAUNCH_US)
    (sync,) = syncs
    decisive = [_decides(lines, rows, position) for position in range(len(lines))]
    return (
        rows[sync].end_us - rows[sync].start_us > LAUNCH_US
        and {"launch", "stream", "wait"} <= set(decisive)
        and "launch" in decisive[:sync]
        and "launch" in decisive[sync + 1 :]
        and {line.stream for line in lines[:sync]} == set(STREAMS)
    )


def _decides(lines: Launches, rows: Sequence[Row], position: int) -> str:
    """The rule without which this line would start earlier, "" if two say the same."""
    line, row = lines[position], rows[position]
    if line.stream == CPU:
        return "sync"
    before = [i for i in range(position) if lines[i].stream == line.stream]
    holds = {
        "stream": rows[before[-1]].end_us if before else 0,
        "wait": max((rows[w].end_us for w in line.waits), default=0),
    }
    holds["launch"] = row.start_us if row.reason == "launch" else -1
    named = [name for name, end_us in holds.items() if end_us == row.start_us]
    return named[0] if len(named) == 1 else ""


def six_launches(number: int) -> Launches:
    """The six launches that belong to a learner's number, and one host sync."""
    return Launches(_own(int(number)))


@lru_cache(maxsize=1)
def unseen() -> tuple[tuple[Launches, int], ...]:
    """Programs, and what a launch costs, to try a function on; short ones first."""
    generator = random.Random(2026)
    programs = [
        (draw(generator, generator.randrange(1, 12)), generator.randrange(1, 20))
        for _ in range(150)
    ]
    return tuple(sorted(programs, key=lambda program: len(program[0])))
