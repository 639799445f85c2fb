"""Which operator must stand behind which, and how much is independent of a collective.

Three reasons: a value is needed; memory is written that another one reads or writes
(through any alias of it); both draw random numbers, whose order is the seed's. And a
pass may hold a launch back, for memory's sake, see `regathering`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from overlaplab.operators import NodeFacts
from overlaplab.techniques.compiler.graphs import (
    HELD_BEHIND,
    facts_of,
    is_coalesced,
    is_item,
    is_launch,
    is_wait,
    payload,
)
from overlaplab.techniques.compiler.words import time_text

Root = Hashable  # one storage: a node, or (node, which of its results)
NodeNs = Callable[[Node], int]


class Memory:
    """Whose memory each value of a graph is, found in the order of the graph."""

    def __init__(self) -> None:
        self._roots: dict[Node, tuple[Root, ...]] = {}

    def add(self, node: Node, facts: NodeFacts) -> tuple[Root, ...]:
        """The storages of what `node` gives."""
        if is_item(node):
            source, index = node.args
            assert isinstance(source, Node)
            known = self._roots[source]
            roots: tuple[Root, ...] = (
                ((source, index),) if known == (source,) else known
            )
        elif facts.aliases:
            found = (root for alias in facts.aliases for root in self._roots[alias])
            roots = tuple(dict.fromkeys(found))
        else:
            roots = (node,)
        self._roots[node] = roots
        return roots

    def of(self, nodes: Iterable[Node]) -> list[Root]:
        """The storages of several values, each once."""
        found = (root for node in nodes for root in self._roots[node])
        return list(dict.fromkeys(found))


def reads_of(node: Node, facts: NodeFacts) -> Iterable[Node]:
    """The inputs whose values `node` needs."""
    if node.op == "output" or getattr(node.target, "_schema", None) is None:
        return () if is_item(node) else node.all_input_nodes
    return facts.reads


@dataclass(frozen=True)
class Dependencies:
    """What must come before what, whatever the order of the graph is now.

    Args:
        nodes: of the graph, in its order.
        needs: of each node, those that must stand before it, directly.
        facts: of each node.
    """

    nodes: tuple[Node, ...]
    needs: Mapping[Node, tuple[Node, ...]]
    facts: Mapping[Node, NodeFacts] = field(repr=False)

    def before(self, targets: Iterable[Node]) -> dict[Node, int]:
        """Which of `targets` must be over before each node: bit i for the i-th."""
        bits = {target: 1 << i for i, target in enumerate(targets)}
        found: dict[Node, int] = {}
        for node in self.nodes:
            mask = 0
            for need in self.needs[node]:
                mask |= found[need] | bits.get(need, 0)
            found[node] = mask
        return found

    def behind(self, targets: Iterable[Node]) -> dict[Node, int]:
        """Which of `targets` each node must be over for: bit i for the i-th."""
        bits = {target: 1 << i for i, target in enumerate(targets)}
        found = dict.fromkeys(self.nodes, 0)
        for node in reversed(self.nodes):
            mask = found[node] | bits.get(node, 0)
            for need in self.needs[node]:
                found[need] |= mask
        return found


def sorted_by(
    needs: Mapping[Any, Sequence[Any]], place: Mapping[Any, float]
) -> list[Any]:
    """Kahn's method: of the nodes that need nothing more, the one with least place.

    Raises:
        ValueError: there is a circle; it names what is in one or behind one.
    """
    missing = {node: len(before) for node, before in needs.items()}
    users: dict[Any, list[Any]] = {node: [] for node in needs}
    for node, before in needs.items():
        for need in before:
            users[need].append(node)
    number = {node: i for i, node in enumerate(needs)}
    ready = [(place[n], number[n], n) for n, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[user], number[user], user))
    if len(order) < len(needs):
        left = [str(node) for node, count in missing.items() if count]
        raise ValueError(f"no order is possible: a circle holds {', '.join(left[:6])}")
    return order


def find_dependencies(graph: Graph) -> Dependencies:
    """The dependencies of a graph, aliases and writes in place included.

    What a launch sends is read until its wait, so who writes there stands behind the
    wait. The output reads all that it returns.

    Raises:
        ValueError: a node has no `meta["val"]`.
    """
    memory = Memory()
    facts: dict[Node, NodeFacts] = {}
    needs: dict[Node, tuple[Node, ...]] = {}
    writer: dict[Root, Node] = {}
    readers: dict[Root, list[Node]] = {}
    sent: dict[Root, list[Root]] = {}  # of a result, what is read until its wait
    drew: Node | None = None
    for node in graph.nodes:
        own = facts[node] = facts_of(node)
        memory.add(node, own)
        found = dict.fromkeys(node.all_input_nodes)
        if held := node.meta.get(HELD_BEHIND):
            found |= dict.fromkeys(n for n in facts if n.name in held)
        reads = memory.of(reads_of(node, own))
        writes = memory.of(own.writes)
        for root in reads:
            if root in writer:
                found[writer[root]] = None
            readers.setdefault(root, []).append(node)
        for root in writes:
            if root in writer:
                found[writer[root]] = None
            found |= dict.fromkeys(readers.pop(root, ()))
            writer[root] = node
        if own.draws:
            if drew is not None:
                found[drew] = None
            drew = node
        if is_launch(node):
            for index, tensor in enumerate(payload(node)):
                own_root: Root = (node, index)
                if not is_coalesced(node):
                    (own_root,) = memory.of([node])
                sent[own_root] = memory.of([tensor])
        elif is_wait(node):
            for result in memory.of([node]):
                writer[result] = node  # who reads it otherwise, as all_reduce_'s input
                for root in sent.get(result, ()):
                    readers.setdefault(root, []).append(node)
        found.pop(node, None)
        needs[node] = tuple(found)
    return Dependencies(tuple(graph.nodes), needs, facts)


@dataclass(frozen=True, slots=True)
class Window:
    """Between what a collective may be launched and must be waited for.

    Args:
        launch: its name.
        ready_ns: computing that must be over before it, alone: the earliest launch.
        behind_ns: computing that needs its result.
        independent_ns: computing that is neither: what may hide it.
        after: the operators that make what it sends, the last of each in the graph.
        reader: the first operator that needs its result, "" if only the caller does.
    """

    launch: str
    ready_ns: int
    behind_ns: int
    independent_ns: int
    after: tuple[str, ...]
    reader: str

    def __str__(self) -> str:
        return (
            f"{self.launch}: after {', '.join(self.after) or 'the inputs'} "
            f"({time_text(self.ready_ns)}), before {self.reader or 'the return'}; "
            f"{time_text(self.independent_ns)} are independent of it"
        )


def find_windows(dependencies: Dependencies, node_ns: NodeNs) -> list[Window]:
    """The window of each collective, in the order of the graph.

    Args:
        dependencies: of the graph.
        node_ns: what each operator takes alone.
    """
    nodes = dependencies.nodes
    found = [node for node in nodes if is_launch(node)]
    before, behind = dependencies.before(found), dependencies.behind(found)
    costs = {n: node_ns(n) for n in nodes if not is_launch(n) and not is_wait(n)}
    windows = []
    for i, launch in enumerate(found):
        ready = sum(ns for node, ns in costs.items() if behind[node] >> i & 1)
        later = sum(ns for node, ns in costs.items() if before[node] >> i & 1)
        reader = next(
            (n.name for n, ns in costs.items() if ns and before[n] >> i & 1), ""
        )
        makers = (_maker(node) for node in launch.all_input_nodes)
        windows.append(
            Window(
                launch.name,
                ready,
                later,
                sum(costs.values()) - ready - later,
                tuple(dict.fromkeys(m.name for m in makers if m.op != "placeholder")),
                reader,
            )
        )
    return windows


def _maker(node: Node) -> Node:
    """Behind views, the operator that made `node`."""
    while (aliases := facts_of(node).aliases) and len(aliases) == 1:
        node = aliases[0]
    return node
