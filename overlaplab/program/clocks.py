"""Happens-before, exactly: vector clocks over the lanes of all recorded ranks.

A lane is a stream, a communicator's stream or a CPU. An operator *knows* how far every
lane had got when it started. Knowledge travels along stream order, communicator order,
`after` (events, stream waits, works), from a host wait to all later launches, and
across ranks through collectives: nobody leaves one before all have entered it.

A collective itself counts from its start on its own rank (then it may read and write)
until its end there.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlaplab.program.graph import Graph


@dataclass(slots=True)
class Clocks:
    """The clocks of a program, by operator id.

    Args:
        lane: of each operator, a running number over all ranks.
        place: of each operator in its lane, from 1.
        known: when it started, the place up to which each lane had ended. The entry of
            its own lane may lag behind: there, `place` decides.
        steps: the order of the walk, see `Graph.walk`.
        waits_for: see `Graph.walk`.
    """

    lane: list[int]
    place: list[int]
    known: list[list[int]]
    steps: list[tuple[int, ...]]
    waits_for: list[int]

    def before(self, one: int, other: int) -> bool:
        """Had `one` certainly ended when `other` started?"""
        lane = self.lane[one]
        if lane == self.lane[other]:
            return self.place[one] < self.place[other]
        return self.known[other][lane] >= self.place[one]


def compute_clocks(graph: Graph) -> Clocks:
    """Clocks of everything that can end (a deadlocked rest knows nothing)."""
    num = len(graph.ops)
    numbers: dict[tuple[int, str], int] = {}
    length: list[int] = []
    lane, place = [0] * num, [0] * num
    for g, op in enumerate(graph.ops):
        key = (op.rank, op.stream)
        lane[g] = numbers.setdefault(key, len(numbers))
        if lane[g] == len(length):
            length.append(0)
        length[lane[g]] += 1
        place[g] = length[lane[g]]
    steps, waits_for = graph.walk()
    nothing = [0] * len(length)
    known, at_end = [nothing] * num, [nothing] * num
    # Lists are shared between operators that know the same, and never changed.
    for step in steps:
        for g in step:
            before = graph.previous[g]
            knows = at_end[before] if before >= 0 else nothing
            for d in (*graph.deps[g], graph.last_host[g]):
                if d >= 0 and lane[d] != lane[g] and knows[lane[d]] < place[d]:
                    knows = list(map(max, knows, at_end[d]))
                    knows[lane[d]] = max(knows[lane[d]], place[d])
            known[g] = at_end[g] = knows
        if len(step) > 1:
            joined = nothing
            for g in step:
                joined = list(map(max, joined, known[g]))
            for g in step:
                joined[lane[g]] = max(joined[lane[g]], place[g] - 1)
            for g in step:
                at_end[g] = joined
    return Clocks(lane, place, known, steps, waits_for)
