"""The pass that says of each collective whether it pays to launch it and go on.

Computing that neither makes what a collective sends nor reads its result can run beside
it. Where there is some, the collective is asynchronous; where there is none, launching
it beside nothing only costs two events, and it is synchronous.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from overlaplab.techniques.compiler.checks import graph_pass
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.dependencies import find_dependencies, find_windows
from overlaplab.techniques.compiler.graphs import GraphError, launches
from overlaplab.techniques.compiler.words import time_text


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided of one collective, and why.

    Args:
        launch: its name.
        is_async: launched, and waited for later.
        message_ns: what it takes alone, latency included.
        independent_ns: computing that can run beside it.
        least_gain_ns: what hiding must save to be worth it.
    """

    launch: str
    is_async: bool
    message_ns: int
    independent_ns: int
    least_gain_ns: int = 0

    def __str__(self) -> str:
        beside = f"computing can run beside its {time_text(self.message_ns)}"
        if not self.independent_ns:
            return f"sync: no {beside}"
        beside = f"{time_text(self.independent_ns)} of {beside}"
        if self.is_async:
            return f"async: {beside}"
        least = time_text(self.least_gain_ns)
        return f"sync: {beside}, which saves no more than {least}"


def plan_decisions(
    graph: Graph, costs: Costs, *, least_gain_ns: int = 0
) -> list[Decision]:
    """Decide for each collective of a graph, in its order.

    Args:
        graph: with buckets as they will travel.
        costs: of its nodes.
        least_gain_ns: a collective is asynchronous if what can be hidden (the smaller
            of message and independent computing) is more than this.
    """
    windows = find_windows(find_dependencies(graph), costs)
    decisions = []
    for launch, window in zip(launches(graph), windows, strict=True):
        message_ns = costs(launch)
        hidden = min(message_ns, window.independent_ns)
        decisions.append(
            Decision(
                launch.name,
                hidden > least_gain_ns,
                message_ns,
                window.independent_ns,
                least_gain_ns,
            )
        )
    return decisions


@graph_pass
def decide(graph: Graph, decisions: list[Decision]) -> None:
    """Write each decision into its launch's `meta["decision"]`; nothing moves yet."""
    named = {node.name: node for node in graph.nodes}
    for decision in decisions:
        if decision.launch not in named:
            raise GraphError(
                f"a decision names {decision.launch}, which this graph does not have. "
                "Decide for the graph that runs."
            )
        named[decision.launch].meta["decision"] = decision
