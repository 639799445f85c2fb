"""From an order of operators and launches to an order of all nodes: where waits go."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.dependencies import Dependencies
from overlaplab.techniques.compiler.graphs import (
    is_launch,
    is_wait,
    launch_of,
    sent_bytes,
    waits,
)


def is_sync(launch: Node) -> bool:
    """Was it decided that who launches it waits for it at once?"""
    decision = launch.meta.get("decision")
    return decision is not None and not decision.is_async


class Placing:
    """Puts nodes into an order, and waits where they must be."""

    def __init__(self, dependencies: Dependencies, limit_bytes: int | None) -> None:
        self._dependencies = dependencies
        self._limit_bytes = limit_bytes
        self._order: list[Node] = []
        self._placed: set[Node] = set()
        self._flying: dict[Node, int] = {}  # launch -> its bytes, oldest first

    def all(self, order: Iterable[Node]) -> list[Node]:
        """Inputs, then `order`, waits in between and behind."""
        for node in self._dependencies.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._place(node)
        for node in order:
            if is_launch(node):
                self._make_room(sent_bytes(node))
            self._place(node)
            if is_launch(node) and is_sync(node):
                self._wait_for(node)
        for launch in list(self._flying):
            self._wait_for(launch)
        for node in self._dependencies.nodes:
            if node.op != "output":
                self._place(node)
        return self._order

    def _make_room(self, num_bytes: int) -> None:
        """See [Note: bytes in flight]."""
        if self._limit_bytes is None:
            return
        while (
            self._flying and sum(self._flying.values()) + num_bytes > self._limit_bytes
        ):
            self._wait_for(next(iter(self._flying)))

    def _wait_for(self, launch: Node) -> None:
        for wait in waits(launch):
            self._place(wait)
        self._flying.pop(launch, None)

    def _place(self, node: Node) -> None:
        """`node`, behind what it needs that is still missing."""
        if node in self._placed:
            return
        for need in self._dependencies.needs[node]:
            self._place(need)
        self._placed.add(node)
        self._order.append(node)
        if is_launch(node):
            self._flying[node] = sent_bytes(node)
        elif is_wait(node):
            launch = launch_of(node)
            if all(wait in self._placed for wait in waits(launch)):
                self._flying.pop(launch, None)


def peak_in_flight(graph: Graph) -> int:
    """The most bytes that were launched and not waited for, at any place of a graph."""
    flying: dict[Node, set[Node]] = {}
    peak = 0
    for node in graph.nodes:
        if is_launch(node):
            flying[node] = set(waits(node))
            peak = max(peak, sum(map(sent_bytes, flying)))
        elif is_wait(node):
            left = flying.get(launch := launch_of(node), set())
            left.discard(node)
            if not left:
                flying.pop(launch, None)
    return peak
