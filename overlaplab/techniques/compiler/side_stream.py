"""The pass that gives each operator a stream: compute, or communication beside it.

Without it a collective is launched from the stream that computes, and what prepares it,
as the copy of a bucket's gradients into one message, holds computing up. On a stream of
its own it does not. An edge of the graph that crosses needs something to hold it:

- from compute to communication an *event*, recorded on compute right before and waited
  for by communication: else gradients leave before they are written;
- back again the *work* of a collective, for which compute waits where the graph does.

[Note: memory of two streams] A block of memory belongs to the stream that allocated it,
and is given out there again as soon as nobody refers to it. So a message is allocated
on compute; what communication reads is referred to until compute has waited for the
collective; and each stretch of communication begins with an event that is recorded
then, behind everything that may still read what communication once allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.dependencies import find_dependencies
from overlaplab.techniques.compiler.graphs import (
    GraphError,
    is_item,
    is_launch,
    is_wait,
    waits,
)

# What may run beside computing if a message alone reads it: copies and scalings.
_PREPARING = frozenset({"_to_copy", "clone", "cat", "div", "mul"})


@dataclass(frozen=True, slots=True)
class Crossing:
    """An event: what it is recorded behind, and what waits for it."""

    after: str
    before: str

    def __str__(self) -> str:
        return f"{self.before} waits for an event behind {self.after}"


@dataclass(frozen=True)
class StreamPlan:
    """What runs beside computing, and what waits for what.

    Args:
        side: names of the nodes on communication; all others are on compute.
        crossings: the events, in order.
    """

    side: tuple[str, ...] = ()
    crossings: tuple[Crossing, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            (f"on communication: {', '.join(self.side)}", *map(str, self.crossings))
        )


def plan_streams(graph: Graph) -> StreamPlan:
    """Collectives, and what only prepares them, on communication; the rest on compute.

    Args:
        graph: in the order in which it will run.
    """
    dependencies = find_dependencies(graph)
    behind: dict[Node, set[Node]] = {node: set() for node in dependencies.nodes}
    for node, needs in dependencies.needs.items():
        for need in needs:
            behind[need].add(node)
    side: set[Node] = set()
    for node in reversed(dependencies.nodes):
        facts = dependencies.facts[node]
        prepares = (
            facts.operator.name in _PREPARING
            and not (facts.writes or facts.draws or facts.aliases)
            and bool(behind[node])
            and behind[node] <= side
        )
        if is_launch(node) or prepares:
            side.add(node)
    crossings, last, crosses = [], "", False
    for node in dependencies.nodes:
        if node not in side:
            last, crosses = node.name, True
        elif crosses:
            crossings.append(Crossing(last, node.name))
            crosses = False
    names = (node.name for node in dependencies.nodes if node in side)
    return StreamPlan(tuple(names), tuple(crossings))


def check_streams(graph: Graph, plan: StreamPlan) -> None:
    """Refuse a plan that leaves an edge between the streams to chance.

    Raises:
        GraphError: an edge crosses and nothing holds it, or a name is not there.
    """
    dependencies = find_dependencies(graph)
    place = {node.name: i for i, node in enumerate(dependencies.nodes)}
    side = set(plan.side)
    for name in (*side, *(n for c in plan.crossings for n in (c.after, c.before))):
        if name not in place:
            raise GraphError(
                f"the plan names {name}, which this graph does not have. Plan the "
                "streams of the graph that runs."
            )
    events = [(place[c.after], place[c.before]) for c in plan.crossings]
    for node, needs in dependencies.needs.items():
        for need in needs:
            if (need.name in side) == (node.name in side):
                continue
            if need.name in side:
                if not (is_launch(need) and _is_over(need, node, place)):
                    raise GraphError(
                        f"{node.name} is on compute and needs {need.name}, which is on "
                        "communication: only a collective's wait brings a value back. "
                        f"Put {need.name} on compute."
                    )
            elif not any(
                place[need.name] <= after and before <= place[node.name]
                for after, before in events
            ):
                raise GraphError(
                    f"{node.name} is on communication and waits for no event behind "
                    f"{need.name}, which is on compute: it would read what is not "
                    "written yet. Add the event."
                )


def _is_over(launch: Node, node: Node, place: dict[str, int]) -> bool:
    """Whether compute has waited for a collective before `node` runs, or does so there.

    `node` may overwrite what was sent, and so need the launch without its result.
    """
    if launch in node.all_input_nodes:
        return is_wait(node) or is_item(node)
    return any(place[wait.name] < place[node.name] for wait in waits(launch))
