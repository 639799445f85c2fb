"""Streams of a rank as lanes: what is on them, and what comes next has to wait for.

In the backward pass, as CUDA's autograd engine has it, a node runs on the stream of its
forward operator and waits for the nodes that its gradients come from, not for others;
the accumulation of a leaf's gradient follows the node before it: the last of those that
use the leaf is the first that did in the forward pass, on whose stream CUDA has it. All
of them come after what the caller's stream had at the start of the backward pass. At
its end, before the callbacks of `queue_callback`, the caller's stream waits for the
streams on which nodes ran, and for no other that a hook entered. (CUDA waits for those
with accumulations and captured gradients; the others' nodes come before these.)

Not known: an accumulation that an older graph or DDP keeps alive has on CUDA the stream
of that time; a node that launches nothing does not make its stream one that is waited
for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from overlaplab.program.record import Access

DEFAULT_LANE = "default"


class Meets(Protocol):
    """What an operator may have to wait for: a collective whose ranks meet."""

    complete: bool
    error: Exception | None

    def give(self, rank: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Unseen:
    """A collective whose results its rank does not see yet."""

    meeting: Meets
    stream: str  # of its communicator, where one runs after the other
    writes: tuple[Access, ...]  # what it will write


@dataclass(slots=True)
class Lane:
    """A stream of one rank."""

    name: str  # as in `Span.lane`
    last: int | None = None  # index of its last operator
    # operators that its next one must wait for
    pending: set[int] = field(default_factory=set)
    # collectives among them that the rank has not met in yet
    unmet: list[Meets] = field(default_factory=list)
    # for each lane the last of its operators that this one is behind
    ordered: dict[str, int] = field(default_factory=dict)

    def frontier(self) -> Frontier:
        """What an event recorded here and now stands for."""
        ops = self.pending if self.last is None else self.pending | {self.last}
        return Frontier(frozenset(ops), tuple(self.unmet))

    def wait(self, frontier: Frontier) -> None:
        """The next operator comes after `frontier`."""
        self.pending.update(frontier.ops)
        for meeting in frontier.unmet:
            if meeting not in self.unmet:
                self.unmet.append(meeting)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Operators that must have ended, and those among them that have not met."""

    ops: frozenset[int] = frozenset()
    unmet: tuple[Meets, ...] = ()


Node = Any  # torch's; its wrapper is the same object as long as somebody holds it
Point = TypeVar("Point")  # what a lane has so far


class GraphTask(Generic[Point]):
    """One backward pass of one rank. `start` is what the caller's stream has; `outside`
    the node of another backward pass that runs this one, None if none."""

    def __init__(self, start: Point, caller: str, outside: Node = None) -> None:
        self.outside = outside
        self.caller = caller
        self.has_ended = False  # its callbacks run
        self.node: Node = None  # the one that runs
        self.lane = caller
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
        is_new = lane not in self._ran and lane != self.caller
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

    def lanes(self) -> list[str]:
        """Where nodes ran, without the caller's."""
        return sorted({*self._ran, self.lane} - {self.caller})

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
