"""The pass that sends the tail, what has nothing to hide behind, on a wider way.

A communicator takes some of a GPU's blocks. Few of them leave more to the computing
beside it, many of them fill a link through the host's memory: on two H200 without P2P
eight blocks carry a message in 0.85 of the time that NCCL's own choice takes, and slow
a large matmul down by 29 % instead of 16. So messages beside the computing are sent as
NCCL likes it, and those that begin when nothing is left to compute on a communicator
that has eight blocks at least. Ranks launch on both in one order: before the tail, the
stream waits for all that was sent before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.checks import graph_pass
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.dependencies import find_dependencies
from overlaplab.techniques.compiler.graphs import (
    GraphError,
    is_launch,
    launches,
    reorder,
    waits,
)
from overlaplab.techniques.compiler.placing import is_sync
from overlaplab.techniques.compiler.predict import predict
from overlaplab.techniques.compiler.scheduling import find_lazy


def plan_tail(graph: Graph, costs: Costs) -> list[str]:
    """Names of the last messages, which begin when nothing is computed any more.

    None where an operator needs an average, as an optimizer does: computing goes on
    between messages. One alone is no tail either, there is nothing beside it.

    Args:
        graph: in the order in which it runs.
        costs: of its nodes; when a message begins is predicted with contention.
    """
    found = launches(graph)
    dependencies = find_dependencies(graph)
    lazy = find_lazy(dependencies)
    behind = dependencies.before(found)
    needed = any(
        behind[node]
        for node in dependencies.nodes
        if node.op == "call_function" and not is_launch(node) and node not in lazy
    )
    if needed or any(map(is_sync, found)):
        return []
    spans = predict(graph, costs).spans
    computed_ns = max((s.end_ns for s in spans if s.kind == "compute"), default=0)
    begins_ns = {
        span.attributes.get("label"): span.start_ns
        for span in spans
        if span.kind == "communication"
    }
    return [n.name for n in found if begins_ns[n.name] >= computed_ns]


@graph_pass
def part_tail(graph: Graph, tail: Sequence[str]) -> None:
    """Launch a tail behind all computing, and behind waits for what was sent before.

    Args:
        graph: the one that was planned.
        tail: of `plan_tail`.

    Raises:
        GraphError: there is no such message, or it is not the last one.
    """
    found = launches(graph)
    names = [launch.name for launch in found]
    if names[len(names) - len(tail) :] != [*tail]:
        raise GraphError(
            f"the tail is {', '.join(tail)}; expected the last messages of "
            f"{', '.join(names)}. Plan the graph that you part."
        )
    dependencies = find_dependencies(graph)
    parted = found[len(found) - len(tail) :]
    early = [wait for n in found if n not in parted for wait in waits(n)]
    behind_early, behind_tail = map(dependencies.before, (early, parted))

    def part(node: Node) -> int:
        if node in parted or behind_tail[node]:
            return 3
        return 1 if node in early else 2 if behind_early[node] else 0

    reorder(graph, sorted(dependencies.nodes, key=part))
