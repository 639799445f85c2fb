"""Accesses to one byte that nothing orders: the hazards of a program.

Exact and without time: two accesses of different lanes to a byte, one of them a write,
with no chain of happens-before between them. reuse.py has those whose byte changes its
owner in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from overlaplab.program.access import overlap
from overlaplab.program.graph import Clocks, Graph
from overlaplab.program.record import Access

Key = tuple[int, int]  # rank, storage


@dataclass(frozen=True, slots=True)
class Use:
    """One access of one operator, by its id."""

    g: int
    access: Access
    writes: bool


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two uses that nothing orders, in program order.

    Their storages differ where the memory of the first was handed out again.
    """

    one: Use
    other: Use

    @property
    def is_reuse(self) -> bool:
        return self.one.access.storage != self.other.access.storage


@dataclass(slots=True)
class Touch:
    """What one lane does with one storage: ids of operators, -1 for none."""

    first: int
    last: int
    first_write: int = -1
    last_write: int = -1


def touches_of(graph: Graph, clocks: Clocks) -> dict[Key, dict[int, Touch]]:
    """For each storage, by lane: the first and last operators that use it."""
    found: dict[Key, dict[int, Touch]] = defaultdict(dict)
    for g, op in enumerate(graph.ops):
        if clocks.waits_for[g] >= 0:  # it never runs
            continue
        lane = clocks.lane[g]
        for accesses, writes in ((op.reads, False), (op.writes, True)):
            for access in accesses:
                lanes = found[op.rank, access.storage]
                touch = lanes.get(lane)
                if touch is None:
                    touch = lanes[lane] = Touch(g, g)
                touch.last = g
                if writes:
                    touch.last_write = g
                    if touch.first_write < 0:
                        touch.first_write = g
    return found


def find_unordered(
    graph: Graph, clocks: Clocks, touches: dict[Key, dict[int, Touch]]
) -> Iterator[Hazard]:
    """All pairs of uses of one storage that nothing orders."""
    shared: dict[Key, list[Use]] = {
        key: []
        for key, lanes in touches.items()
        if len(lanes) > 1 and any(t.first_write >= 0 for t in lanes.values())
    }
    if not shared:
        return
    for step in clocks.steps:  # an order in which they may happen
        for g in step:
            op = graph.ops[g]
            for accesses, writes in ((op.writes, True), (op.reads, False)):
                for access in accesses:
                    uses = shared.get((op.rank, access.storage))
                    if uses is not None:
                        uses.append(Use(g, access, writes))
    for uses in shared.values():
        yield from _unordered(clocks, uses)


def _unordered(clocks: Clocks, uses: list[Use]) -> Iterator[Hazard]:
    # Lane -> its uses so far: what writes, and everything. A read minds writes only.
    written: dict[int, list[Use]] = {}
    used: dict[int, list[Use]] = {}
    for use in uses:
        own = clocks.lane[use.g]
        for lane, earlier in (used if use.writes else written).items():
            if lane == own:
                continue
            # Ordered by place: from the back until the first that is known to be over.
            known = clocks.known[use.g][lane]
            for old in reversed(earlier):
                if clocks.place[old.g] <= known:
                    break
                if overlap(old.access, use.access):
                    yield Hazard(*((old, use) if old.g < use.g else (use, old)))
        used.setdefault(own, []).append(use)
        if use.writes:
            written.setdefault(own, []).append(use)
