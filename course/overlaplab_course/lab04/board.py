"""The machine of lab 04, and how its cells and graders run a step on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.cluster.run import Run, run
from overlaplab.grading.origins import Held, hold, release
from overlaplab.hardware import Hardware, Link, collective_ns, find_hardware
from overlaplab.program import Program
from overlaplab.timeline import Timeline
from overlaplab.view.units import percentages

MIB = 2**20
NUM_RANKS = 4

# `chalk` with a CPU that takes its time: round numbers for the head.
BOARD: Hardware = replace(
    find_hardware("chalk"),
    name="board",
    launch_ns=5_000,
    collective_launch_ns=10_000,
    link=Link(
        latency_ns=10_000,
        bytes_per_s=10 * 10**9,
        source="round numbers: 10 us, then 0.1 ns a byte that crosses the link",
    ),
    source=(
        "no machine: 1000 FLOP take 1 ns, a message 10 us and 0.1 ns a byte on the "
        "wire, a launch 5 us of the CPU, 10 us for a collective"
    ),
)

# One byte a nanosecond and no latency: `collective_ns` then counts bytes.
_COUNTER: Hardware = replace(
    find_hardware("chalk"), link=Link(latency_ns=0, bytes_per_s=10**9)
)

Inputs = Sequence[tuple[Any, ...]]


def play(
    step: Callable[..., Any],
    inputs: Inputs,
    *args: Any,
    hardware: Hardware = BOARD,
    timeout_s: float = 60,
) -> Run:
    """Call `step(*inputs[rank], *args)` on each of `len(inputs)` ranks.

    The inputs are there before the step begins: making them is not recorded. Both ends
    are noted for `origin_law`.
    """
    recorded = run(
        _on_rank,
        step,
        list(inputs),
        args,
        world_size=len(inputs),
        hardware=hardware,
        timeout_s=timeout_s,
    )
    return release(recorded)


def _on_rank(step: Callable[..., Any], inputs: Inputs, args: tuple[Any, ...]) -> Held:
    return hold(step, *inputs[dist.get_rank()], *args)


def matrices(
    rows: int, shapes: Mapping[str, tuple[int, int]], num_ranks: int = NUM_RANKS
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """(x, w) of each rank: `rows` rows of input, and matrices by name.

    Entries are scaled so that products stay near 1; each rank has its own.
    """
    width = next(iter(shapes.values()))[0]
    made = []
    for rank in range(num_ranks):
        draw = torch.Generator().manual_seed(100 + rank)
        x = torch.randn(rows, width, generator=draw)
        w = {
            name: torch.randn(n, m, generator=draw) / n**0.5
            for name, (n, m) in shapes.items()
        }
        made.append((x, w))
    return made


def wire_bytes(operation: str, num_ranks: int, num_bytes: int) -> int:
    """Bytes that cross one rank's link in a collective of `num_bytes`, rounded up."""
    return collective_ns(_COUNTER, operation, num_ranks, num_bytes)[1]


def sent_bytes(program: Program, rank: int = 0) -> int:
    """Bytes that cross the link of `rank` in all its collectives."""
    return sum(
        wire_bytes(c.operation, len(c.ranks), c.bytes)
        for op in program.ranks[rank]
        if (c := op.collective) is not None
    )


def message_ns(num_bytes: int, num_ranks: int = NUM_RANKS) -> int:
    """What an all-reduce of `num_bytes` takes on the board, alone."""
    return sum(collective_ns(BOARD, "all_reduce", num_ranks, num_bytes))


def cpu_waits_ns(timeline: Timeline, rank: int = 0) -> int:
    """How long the CPU of `rank` waits for its device."""
    return sum(
        span.duration_ns
        for span in timeline.spans
        if span.kind == "host" and span.rank == rank
    )


def shares_text(timeline: Timeline) -> str:
    """The shares of the critical path, in the percents of `view.table`."""
    shares_ns = timeline.critical_path().shares_ns
    named = zip(shares_ns, percentages(shares_ns.values()), strict=True)
    return ", ".join(f"{share} {percent} %" for share, percent in named if percent)
