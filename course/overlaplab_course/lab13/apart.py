"""13.7: ranks that order their launches by times that each has measured by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run
from overlaplab.grading import stage
from overlaplab.techniques.compiler import generate
from overlaplab_course.lab13 import graphs
from overlaplab_course.lab13.graphs import AFTER, WIDTH
from overlaplab_course.lab13.moves import SLOW

NAMES = ("dw3", "dw2", "dw1")
Times = Mapping[str, float]  # of each gradient, when it was ready, in ms
PlanLaunches = Callable[[Times], Sequence[str]]


@dataclass(frozen=True)
class Twins:
    """What each rank has measured.

    Args:
        times: by rank.
    """

    times: tuple[Times, ...]

    @cached_property
    def apart(self) -> tuple[str, str]:
        """Where two ranks that sort by their own times first send different ones: what
        rank 0 sends there, and rank 1."""
        first, second = (sorted(times, key=times.__getitem__) for times in self.times)
        return next(p for p in zip(first, second, strict=True) if p[0] != p[1])

    @property
    def right(self) -> list[str]:
        """By the slowest rank."""
        return sorted(NAMES, key=lambda name: max(t[name] for t in self.times))

    def play(self, plan_launches: PlanLaunches) -> Played:
        """Run the backward pass; each rank launches in the order of its own plan."""
        run: Run = stage.run(
            _on_rank,
            plan_launches,
            [dict(times) for times in self.times],
            world_size=len(self.times),
            hardware=SLOW,
            timeout_s=30,
        )
        orders, averages = zip(*run.values, strict=True)
        return Played(self, orders, averages, len(run.warnings))

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: " + ", ".join(f"{k} ready at {ms} ms" for k, ms in t.items())
            for rank, t in enumerate(self.times)
        )


@dataclass(frozen=True)
class Played:
    """What a run with a plan per rank gave.

    Args:
        twins: the times.
        orders: by rank, what it launched, in order.
        averages: by rank, of each gradient by name.
        num_findings: of the virtual cluster.
    """

    twins: Twins
    orders: Sequence[Sequence[str]]
    averages: Sequence[Mapping[str, torch.Tensor]]
    num_findings: int

    def wrong(self) -> list[tuple[int, str, float]]:
        """(rank, gradient, how far off), of averages that are not right."""
        right = _averages(len(self.twins.times))
        return [
            (rank, name, (mine[name] - right[name]).abs().max().item())
            for rank, mine in enumerate(self.averages)
            for name in NAMES
            if not torch.allclose(mine[name], right[name], atol=1e-5)
        ]

    def __str__(self) -> str:
        lines = [
            f"rank {rank} sends {', '.join(order)}"
            for rank, order in enumerate(self.orders)
        ]
        off = [
            f"rank {rank}: the average of {name} is off by up to {by:.2f}"
            for rank, name, by in self.wrong()
        ]
        found = f"{self.num_findings} findings, no error"
        return "\n".join([*lines, found, *(off or ["all averages are right"])])


def twins(number: int) -> Twins:
    """Two ranks of which one measured two neighbours the other way round."""
    draw = random.Random(f"apart {number}")
    swapped = draw.randrange(2)
    first = {name: 4.0 * (i + 1) for i, name in enumerate(NAMES)}
    second = dict(first)
    early, late = NAMES[swapped : swapped + 2]
    second[early] = second[late] + draw.randrange(1, 4)
    # The slower rank's dictionary has another order, too.
    return Twins((first, dict(reversed(second.items()))))


def _inputs(rank: int) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(rank)
    return [torch.randn((WIDTH, WIDTH), generator=make) / 10 for _ in range(7)]


def _averages(num_ranks: int) -> dict[str, torch.Tensor]:
    """The right ones, in one process."""
    sums = {name: torch.zeros(WIDTH, WIDTH) for name in NAMES}
    for rank in range(num_ranks):
        grad, x3, w3, x2, w2, x1, _ = _inputs(rank)
        for name, x, w in (("dw3", x3, w3), ("dw2", x2, w2), ("dw1", x1, w3)):
            sums[name] += grad.t() @ x
            grad = grad @ w
    return {name: total / num_ranks for name, total in sums.items()}


def _on_rank(
    plan_launches: PlanLaunches, times: Sequence[Times]
) -> tuple[list[str], dict[str, torch.Tensor]]:
    planned = plan_launches(dict(times[dist.get_rank()]))
    order = graphs.names_in(planned, "plan_launches", "a list of names")
    if sorted(order) != sorted(NAMES):
        raise ValueError(
            f"plan_launches returned {order}; expected {', '.join(NAMES)}, each once"
        )
    graph = graphs.graph_of(AFTER)
    named = {node.name: node for node in graph.nodes}
    last = named["dw1"]
    for name in order:
        last.append(named[f"all_reduce_{name}"])
        last = named[f"all_reduce_{name}"]
    inputs = [x.to(streams.device()) for x in _inputs(dist.get_rank())]
    assert dist.group.WORLD is not None
    code = generate(graph, "backward").run
    _, *averages = code(inputs, dist.group.WORLD, streams.device())
    return order, dict(zip(NAMES, averages, strict=True))
