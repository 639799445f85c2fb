"""What the grader of lab 13 makes of a graph whose nodes somebody has moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from overlaplab import streams
from overlaplab.cluster.run import Run
from overlaplab.grading import origins, stage
from overlaplab.grading.orders import disagree
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import Program, only_step, resolve
from overlaplab.techniques.compiler import Costs, generate, predict
from overlaplab.timeline import Timeline
from overlaplab_course.lab13 import graphs

NUM_RANKS = 2
# A product of two (100, 100) takes 2 ms; two ranks average one in 5: 1 ms of latency,
# 4 of wire.
SLOW = replace(
    find_hardware("chalk"),
    name="chalk in slow motion",
    flops_per_s={"default": 10**9},
    memory_bytes_per_s=10**9,
    link=Link(latency_ns=1_000_000, bytes_per_s=10**7, source="round numbers"),
    source="no machine: round numbers for the head",
)
COSTS = Costs(SLOW, NUM_RANKS)


@dataclass(frozen=True)
class Moved:
    """A case in the order that a learner's pass gave it.

    Args:
        case: of `graphs.CASES`.
        rows: what `graphs.passed` said.
    """

    case: str
    rows: Sequence[tuple[str, str]]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.rows]

    @cached_property
    def before(self) -> Graph:
        """The case as it was handed out."""
        return graphs.graph_of(self.case)

    @cached_property
    def needs(self) -> graphs.Needs:
        """Of each node of `before`."""
        return graphs.needs_of(self.before)

    def changed(self, moves: Callable[[Graph], list[Node]]) -> str:
        """What is not as it was, of all but what `moves` names; "" if nothing."""
        was = graphs.signature(self.before)
        if len(self.rows) != len(was) or sorted(self.rows) != sorted(was):
            other = [text for _, text in self.rows if text not in {t for _, t in was}]
            lost = [name for name, _ in was if name not in self.names]
            said = f"new: {other[0].strip()}" if other else f"lost: {', '.join(lost)}"
            return said if other or lost else "a node stands in it twice"
        free = {node.name for node in moves(self.before)}
        left = [name for name, _ in was if name not in free]
        mine = [name for name in self.names if name not in free]
        wrong = [pair for pair in zip(mine, left, strict=True) if pair[0] != pair[1]]
        return f"{wrong[0][0]} stands where {wrong[0][1]} stood" if wrong else ""

    @cached_property
    def place(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def early(self) -> tuple[Node, Node] | None:
        """A node that stands before one that it needs, and that one."""
        for node in self.before.nodes:
            for need in self.needs[node]:
                if self.place[need.name] > self.place[node.name]:
                    return node, need
        return None

    def between(self, one: Node, other: Node, kinds: Sequence[Node]) -> list[str]:
        """Those of `kinds` that stand between two nodes."""
        low, high = self.place[one.name], self.place[other.name]
        return [node.name for node in kinds if low < self.place[node.name] < high]

    def after(self, width: int = graphs.WIDTH) -> Graph:
        """The grader's own graph in the new order."""
        graph = graphs.graph_of(self.case, width)
        named = {node.name: node for node in graph.nodes}
        last = named[self.names[-1]]
        for name in self.names[:-1]:
            last.prepend(named[name])
        return graph

    @property
    def timeline(self) -> Timeline:
        """In slow motion: a matmul takes 2 ms and a message 5."""
        return timed(self.after())


def timed(graph: Graph, costs: Costs = COSTS) -> Timeline:
    """The timeline of a graph as it stands, operators by the names of their nodes."""
    timeline = predict(graph, costs)
    spans = (
        replace(span, name=str(span.attributes.get("label", span.name)))
        for span in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


def run_code(graph: Graph, num_ranks: int = NUM_RANKS) -> Run:
    """Generate code for a graph of averages; run it with values of each rank's own."""
    code = generate(graph, "backward").run
    shapes = [n.meta["val"].shape for n in graph.nodes if n.op == "placeholder"]
    recorded = stage.run(
        _on_rank, code, shapes, world_size=num_ranks, hardware=SLOW, timeout_s=30
    )
    return origins.release(recorded)


def run_graph(graph: Graph) -> Timeline:
    """The timeline of rank 0 while the code made of `graph` runs on two ranks."""
    program = run_code(graph).program
    assert program is not None
    names = [node.name for node in graphs.operators(graph)]
    sent = [node.name for node in graphs.launches(graph)]
    return step_of(program, names, sent)


def step_of(
    program: Program, names: Sequence[str] = (), sent: Sequence[str] = ()
) -> Timeline:
    """Rank 0's step on the slow clock, without its label.

    Args:
        program: of a run with one step.
        names: of what it computes, in the order of launching.
        sent: of its messages.
    """
    timeline = resolve(only_step(program), SLOW).of_rank(0)
    told = {"compute": iter(names), "communication": iter(sent)}
    spans = [
        replace(
            span,
            name=next(told.get(span.kind, iter(())), span.name),
            attributes={k: v for k, v in span.attributes.items() if k != "label"},
        )
        for span in timeline.spans
    ]
    return replace(timeline, spans=tuple(spans))


def link(latency_ms: float) -> Costs:
    """Costs on a link of another latency; its bytes take what they took."""
    own = replace(SLOW.link, latency_ns=int(latency_ms * 1e6))
    return Costs(replace(SLOW, name=f"latency {latency_ms} ms", link=own), NUM_RANKS)


def _on_rank(code: Callable[..., Any], shapes: Sequence[torch.Size]) -> origins.Held:
    make = torch.Generator().manual_seed(dist.get_rank())
    args = [torch.randn(shape, generator=make) / 10 for shape in shapes]
    inputs = [arg.to(streams.device()) for arg in args]
    streams.synchronize()
    with streams.annotate("step"):
        return origins.hold(_call, code, inputs)


def _call(code: Callable[..., Any], args: list[torch.Tensor]) -> Any:
    assert dist.group.WORLD is not None
    return code(list(args), dist.group.WORLD, streams.device())


@lru_cache(maxsize=16)
def as_handed_out(case: str, num_ranks: int, width: int) -> Run:
    """The code of a case as it was handed out, run: nothing of it overlaps."""
    return run_code(graphs.graph_of(case, width), num_ranks)


def step_ns(run: Run, hardware: Hardware) -> int:
    """What a run takes on a clock, with the making of its inputs."""
    assert run.program is not None
    return resolve(run.program, hardware).step_ns


def orders(graph_pass: Callable[..., Any], case: str) -> list[list[str]]:
    """In which order each of two ranks would send, if sets have an order on each."""
    sent: Sequence[list[str]] = stage.run(
        _order_on_rank, graph_pass, case, world_size=NUM_RANKS, hardware=SLOW
    ).values
    return list(sent)


def _order_on_rank(graph_pass: Callable[..., Any], case: str) -> list[str]:
    graph = graphs.graph_of(case)
    returned = disagree(graph_pass)(graph, graphs.needs_of(graph))
    graph = returned if isinstance(returned, Graph) else graph
    return [node.name for node in graphs.launches(graph)]
