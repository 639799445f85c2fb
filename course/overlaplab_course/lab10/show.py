"""What lab 10 shows: memory by kind, bytes on the wire, steps over depths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from matplotlib.figure import Figure

from overlaplab.cluster.run import Run, run
from overlaplab.hardware import Hardware, find_hardware, with_link
from overlaplab.program.times import Times
from overlaplab.timeline import Timeline
from overlaplab.timeline.span import MEMORY_KINDS
from overlaplab.view.colors import INK
from overlaplab.view.stacking import Picture
from overlaplab_course import stored
from overlaplab_course.drawing import LINES, in_words, legend, quiet_axes
from overlaplab_course.gpts import step_of
from overlaplab_course.lab10 import reference
from overlaplab_course.lab10.given import (
    EQUAL,
    NUM_RANKS,
    Backward,
    Played,
    Stack,
    Weights,
    play_step,
)
from overlaplab_course.lab10.ring import (
    find_gathers,
    find_uses,
    wire_bytes,
    with_ring,
)

MIB = 2**20

# -- section 1: a GPT, whole and sharded

# Four nodes, 400 Gbit/s; the step is captured in a CUDA graph: launches cost nothing.
INFINIBAND: Hardware = replace(
    with_link(
        find_hardware("h100-nvlink"), latency_ns=20_000, bytes_per_s=50_000_000_000
    ),
    name="infiniband-400g, captured",
    launch_ns=0,
    collective_launch_ns=0,
)


def record(train: Callable[..., Any], *args: Any) -> Run:
    """`train(*args)` on four nodes, shapes only; one rank stands for all."""
    options: dict[str, Any] = {"world_size": NUM_RANKS, "hardware": INFINIBAND}
    return run(train, *args, fake=True, timeout_s=90, **options)


def held_mib(recorded: Run) -> dict[str, float]:
    """The most of each kind at any time of the second step, in MiB."""
    timeline = step_of(recorded)
    (memory,) = timeline.memory
    times = [time for time, _ in memory.steps if time >= timeline.start_ns]
    most: dict[str, int] = {}
    for time in (timeline.start_ns, *times):
        for kind, size in memory.kinds_at(time):
            most[kind] = max(most.get(kind, 0), size)
    return {kind: most[kind] / MIB for kind in MEMORY_KINDS if most.get(kind)}


_LEFT_OUT = ("activations", "inputs", "workspaces", "other")


def all_but_activations(recorded: Run) -> float:
    """MiB of what sharding is about: the sum of those kinds' most."""
    every = held_mib(recorded).items()
    return sum(size for kind, size in every if kind not in _LEFT_OUT)


def kinds_table(runs: Mapping[str, Run]) -> str:
    """The most of each kind in MiB, a column for each run."""
    columns = {name: held_mib(recorded) for name, recorded in runs.items()}
    rows = [
        (kind, *(f"{column.get(kind, 0):.0f}" for column in columns.values()))
        for kind in MEMORY_KINDS
        if any(column.get(kind, 0) >= 0.5 for column in columns.values())
    ]
    return stored.text_table(("most at any time, MiB", *columns), rows)


def wire_mib(recorded: Run, step: int = 1) -> float:
    """What crosses one rank's link in the second step, in MiB."""
    assert recorded.program is not None
    ops = {s.attributes.get("op") for s in step_of(recorded, step).spans}
    every = recorded.program.ranks[0]
    return sum(wire_bytes(op) for op in every if op.index in ops) / MIB


# -- section 2


def cut_text(shapes: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int) -> str:
    """A row of weights and where it is cut, a character for each element."""
    row = "".join(name[0] * torch.Size(shape).numel() for name, shape in shapes)
    size = -(-len(row) // num_ranks)
    row = row.ljust(size * num_ranks, "0")
    parts = [row[i * size : (i + 1) * size] for i in range(num_ranks)]
    names = ", ".join(f"{name} {shape}" for name, shape in shapes)
    lines = [f"{names}: {sum(c != '0' for c in row)} elements"]
    lines += [f"rank {rank}: {part}" for rank, part in enumerate(parts)]
    return "\n".join(lines)


# -- sections 3 to 6: steps on the board


def play(
    weights: Weights,
    *args: Any,
    stack: Stack = EQUAL,
    backward: Backward | None = None,
    num_ranks: int = NUM_RANKS,
) -> Played:
    """The forward of a stack on four ranks of the board, with `weights(units, *args)`.

    Args:
        backward: with this, a whole step.
    """
    return play_step(
        stack, weights, args, reference.forward, backward, num_ranks=num_ranks
    )


@lru_cache(maxsize=32)
def play_ours(depth: int, stack: Stack = EQUAL, *, backward: bool = False) -> Played:
    """The course's own prefetcher; with `backward`, a whole step."""
    own = reference.backward if backward else None
    return play(reference.prefetched, depth, stack=stack, backward=own)


def drawn(seen: Played) -> Timeline:
    """Rank 0 of a step, with a lane for each slot of the ring."""
    return with_ring(seen.program, seen.run.timeline)


def layers_table(seen: Played) -> str:
    """How long a layer's gather and forward take; layers that are alike share a row."""
    times = Times(seen.program, seen.run.timeline.of_rank(0))
    uses = {use.layer: use for use in find_uses(seen.program, 0)}
    alike: dict[tuple[str, str], list[str]] = {}
    for gather in find_gathers(seen.program, 0):
        use, span = uses[gather.layer or 0], times.of(gather.op)
        assert span is not None
        forward_ns = times.end(0, use.ops[-1]) - times.start(0, use.ops[0])
        row = (f"{(span[1] - span[0]) / 1e6:.0f}", f"{forward_ns / 1e6:.0f}")
        alike.setdefault(row, []).append(str(use.layer))
    rows = [(", ".join(layers), *row) for row, layers in alike.items()]
    return stored.text_table(("layers", "gather (ms)", "forward (ms)"), rows)


def slots_alive(seen: Played) -> float:
    """The most memory that gathers filled, at any time, in layers of the largest."""
    filled = {gather.place[0] for gather in find_gathers(seen.program, 0)}
    lives = [s for s in seen.program.storages if s.rank == 0 and s.storage in filled]
    largest = max(gather.bytes for gather in find_gathers(seen.program, 0))
    moments = {life.born for life in lives}
    most = max(
        sum(s.bytes for s in lives if s.born <= t and (s.freed is None or s.freed > t))
        for t in moments
    )
    return most / largest


def draw_depths(sweeps: Mapping[str, Mapping[int, float]]) -> Figure:
    """Steps over depth, each relative to its own best."""
    lines = {
        name: [(depth, step / min(steps.values())) for depth, step in steps.items()]
        for name, steps in sweeps.items()
    }
    across, up = "depth (layers in memory: one more)", "step / best step"
    figure = Picture(alt=in_words(lines, across, up), figsize=(8, 3.2))
    ax = quiet_axes(figure, (0.09, 0.17, 0.58, 0.76), across, up)
    styles = ("o-", "s--", "^-.")
    for (name, points), color, style in zip(lines.items(), LINES, styles, strict=False):
        ax.plot(*zip(*points, strict=True), style, color=color, label=name)
    ax.axhline(1, color=INK, linewidth=0.8, zorder=0)
    ax.set_xticks(range(max(max(steps) for steps in sweeps.values()) + 1))
    legend(figure, 0.68)
    return figure
