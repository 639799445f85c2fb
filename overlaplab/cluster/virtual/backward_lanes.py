"""On which lane a node of the backward pass runs, and for whom it waits.

As CUDA's autograd engine has it: a node runs on the stream of its forward operator and
waits for the nodes that its gradients come from, not for others; the accumulation of a
leaf's gradient follows the node before it. All of them come after what the caller's
stream had at the start of the backward pass.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Node = Any  # torch's; its wrapper is the same object as long as somebody holds it
Point = TypeVar("Point")  # what a lane has so far


class GraphTask(Generic[Point]):
    """One backward pass of one rank.

    Args:
        start: what the caller's stream has.
        caller: name of its lane.
    """

    def __init__(self, start: Point, caller: str) -> None:
        self.node: Node = None  # the one that runs
        self.lane = caller
        self._caller = caller
        self._start = start
        # By lane: the nodes that ran, and what it had after each.
        self._ran: dict[str, list[tuple[Node, Point]]] = {}
        self._bits: dict[Node, int] = {}  # a bit for each node,
        self._above: dict[Node, int] = {}  # and those of all that come before it

    def begin(self, node: Node, lane: str, point: Point) -> list[Point]:
        """`node` runs next, on `lane`; the one before had brought its lane to `point`.

        Returns:
            The points of other lanes that `lane` has to wait for.
        """
        if self.node is not None:
            self._ran.setdefault(self.lane, []).append((self.node, point))
        is_new = lane not in self._ran and lane != self._caller
        waits = [self._start] if is_new else []
        for other, ran in self._ran.items():
            if other == lane:
                continue
            if node not in self._above:
                before = [n for nodes in self._ran.values() for n, _ in nodes]
                self._survey([*before, node])
            above = self._above[node]
            for earlier, reached in reversed(ran):
                if above & self._bits[earlier]:
                    waits.append(reached)
                    break
        self.node, self.lane = node, lane
        return waits

    def _survey(self, roots: list[Node]) -> None:
        """All nodes below `roots`, and for each those above it."""
        order: list[Node] = []  # a node stands behind all that are below it
        known = {None}
        stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.append(node)
            elif node not in known:
                known.add(node)
                stack.append((node, True))
                stack += [(below, False) for below, _ in node.next_functions]
        self._bits = {node: 1 << number for number, node in enumerate(order)}
        self._above = dict.fromkeys(order, 0)
        for node in reversed(order):
            above = self._above[node] | self._bits[node]
            for below, _ in node.next_functions:
                if below is not None:
                    self._above[below] |= above
