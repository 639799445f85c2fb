"""The order of a program, without any time: who must end before whom.

The one reading that `resolve`, `find_deadlock`, `find_findings` and the graders' laws
share. Operators of all recorded ranks get one running number ("id"): rank by rank, each
in the order of its CPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from overlaplab.errors import ProgramError
from overlaplab.program.record import Op, Program

HOST_KINDS = ("host", "host_wait")


@dataclass(slots=True)
class Meeting:
    """One collective, as the recorded ranks see it."""

    group: str  # its communicator
    sequence: int  # its number in it
    members: list[int]  # ids of the operators that were launched for it
    expected: int  # how many recorded ranks take part

    @property
    def matched(self) -> bool:
        return len(self.members) == self.expected


@dataclass(slots=True)
class Graph:
    """A program as a graph of ids."""

    program: Program  # what it was made of
    ops: list[Op]  # all operators, by id
    base: list[int]  # id of each rank's first operator
    # id before this one on the same lane, -1 for the first. Communication follows its
    # lane and its communicator, see `deps`
    previous: list[int]
    # id of the last host operator that the CPU passed before launching this one, -1 if
    # none
    last_host: list[int]
    # ids that must have ended before this one starts (or, for "host_wait", ends), apart
    # from the CPU: lane, communicator and `after`
    deps: list[list[int]]
    meeting: list[int]  # for communication, the index in `meetings`, else -1
    meetings: list[Meeting]  # every collective

    def unmatched(self, g: int) -> bool:
        """Is `g` a collective that not all of its ranks launched?"""
        return self.meeting[g] >= 0 and not self.meetings[self.meeting[g]].matched

    def rank_ids(self, rank: int) -> range:
        start = self.base[rank]
        return range(start, start + len(self.program.ranks[rank]))

    def walk(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """An order in which everything that can end does, and what never ends.

        Returns:
            The steps, each the ids that end together (one, or the members of a
            collective), and for each id the number of dependencies that it still
            waits for: -1 where it ended, 0 for a collective that started and whose
            peers did not come.
        """
        num = len(self.ops)
        waits_for = [0] * num
        dependents: list[list[int]] = [[] for _ in range(num)]
        for g, deps in enumerate(self.deps):
            for d in deps:
                dependents[d].append(g)
            host = self.last_host[g]
            if host >= 0:
                dependents[host].append(g)
            waits_for[g] = len(deps) + (host >= 0)
        arrived = [0] * len(self.meetings)
        steps: list[tuple[int, ...]] = []
        startable = [g for g in range(num - 1, -1, -1) if waits_for[g] == 0]
        while startable:
            g = startable.pop()
            m = self.meeting[g]
            if m < 0:
                ended: tuple[int, ...] = (g,)
            else:
                arrived[m] += 1
                if arrived[m] < self.meetings[m].expected:
                    continue
                ended = tuple(self.meetings[m].members)
            steps.append(ended)
            for e in ended:
                waits_for[e] = -1
                for d in dependents[e]:
                    waits_for[d] -= 1
                    if waits_for[d] == 0:
                        startable.append(d)
        return steps, waits_for


def check_program(program: object) -> None:
    """Refuse what is no program, in the words of who passed it.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(program, Program):
        raise TypeError(
            f"program is {type(program).__name__}; expected an overlaplab Program: "
            "`run.program` of a run on the virtual cluster (measured runs have none), "
            "or what ProgramBuilder.build() returns"
        )


def build_graph(program: Program) -> Graph:
    """The dependencies of `program`.

    Raises:
        TypeError: `program` is none.
        ProgramError: an operator waits for one that is launched after it or is not
            there; or a rank takes part twice in one collective, or in one of which it
            is no member.
    """
    check_program(program)
    ops = [op for rank in program.ranks for op in rank]
    num = len(ops)
    graph = Graph(program, ops, [], [-1] * num, [-1] * num, [], [-1] * num, [])
    numbers: dict[tuple[str, int], int] = {}
    g = 0
    for rank, recorded in enumerate(program.ranks):
        base = g
        graph.base.append(base)
        last: dict[str, int] = {}
        host = -1
        for op in recorded:
            if op.rank != rank or op.index != g - base:
                raise ProgramError(
                    f"op {g - base} of rank {rank} says that it is op {op.index} of "
                    f"rank {op.rank}; `index` and `rank` are its place in the program"
                )
            if op.after and not 0 <= min(op.after) <= max(op.after) < op.index:
                raise ProgramError(
                    f"op {op.index} ({op.name}) of rank {rank} waits for ops "
                    f"{list(op.after)}; expected 0 to {op.index - 1}: launched "
                    "before it"
                )
            # The CPU's own order already puts a launch behind every host operator.
            deps = [base + a for a in op.after if recorded[a].kind not in HOST_KINDS]
            graph.last_host[g] = host
            if op.kind in HOST_KINDS:
                graph.previous[g] = host
                host = g
            else:
                _follow(graph, last, "stream:" + op.stream, g, deps)
            if op.kind == "communication":
                _meet(graph, numbers, rank, op, g)
                assert op.collective is not None
                _follow(graph, last, "group:" + op.collective.group, g, deps)
            graph.deps.append(deps)
            g += 1
    return graph


def _follow(
    graph: Graph, last: dict[str, int], lane: str, g: int, deps: list[int]
) -> None:
    before = last.get(lane, -1)
    last[lane] = g
    if lane.startswith("stream:"):
        graph.previous[g] = before
    if before >= 0 and before not in deps:
        deps.append(before)


def _meet(
    graph: Graph, numbers: dict[tuple[str, int], int], rank: int, op: Op, g: int
) -> None:
    collective = op.collective
    if collective is None:
        raise ProgramError(
            f"op {op.index} ({op.name}) of rank {rank} is communication without a "
            "`collective`; give it one, or make it compute"
        )
    if rank not in collective.ranks and graph.program.represents == 1:
        raise ProgramError(
            f"rank {rank} launches {describe(op)}, but the ranks of "
            f"process group {collective.group!r} are {list(collective.ranks)}"
        )
    key = (collective.group, collective.sequence)
    index = numbers.get(key)
    if index is None:
        index = numbers[key] = len(graph.meetings)
        recorded = range(len(graph.program.ranks))
        # Of a representative's peers those that are not recorded are taken to be there.
        expected = max(1, sum(1 for r in collective.ranks if r in recorded))
        graph.meetings.append(Meeting(*key, [], expected))
    meeting = graph.meetings[index]
    if meeting.members and graph.ops[meeting.members[-1]].rank == rank:
        raise ProgramError(
            f"rank {rank} launches {describe(op)} twice (op "
            f"{graph.ops[meeting.members[-1]].index} and op {op.index}); every "
            "collective of a communicator has its own sequence number"
        )
    meeting.members.append(g)
    graph.meeting[g] = index


def describe(op: Op) -> str:
    """How reports name an operator: 'all_reduce #5 (bucket 2)' or 'mm (op 3)'."""
    if op.collective is None:
        return f"{op.name} (op {op.index}{', ' + op.label if op.label else ''})"
    group, operation = op.collective.group, op.collective.operation
    name = f"{operation} #{op.collective.sequence}"
    if operation in ("send", "recv"):  # its group is the pair, '1->0'
        name += f" of {group!r}"
    elif group != "default":
        name += f" of process group {group!r}"
    return f"{name} ({op.label})" if op.label else name


def iter_collectives(ops: tuple[Op, ...]) -> Iterator[Op]:
    """The communication operators of one rank, in the order of its CPU."""
    return (op for op in ops if op.collective is not None)


def list_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class StreamOrder:
    """The operators of one rank by stream, as indices in the order of their launch."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._indices: dict[str, list[int]] = defaultdict(list)
        for op in ops:
            self._indices[op.stream].append(op.index)

    def before(self, stream: str, index: int) -> int | None:
        """The last operator of `stream` that was launched before op `index`."""
        at = bisect_left(self._indices[stream], index)
        return self._indices[stream][at - 1] if at else None

    def after(self, stream: str, index: int) -> int | None:
        """Its first operator that was launched at op `index` or later."""
        at = bisect_left(self._indices[stream], index)
        return self._indices[stream][at] if at < len(self._indices[stream]) else None


def first_collectives(graph: Graph, ids: Iterable[int]) -> dict[int, Op]:
    """For each operator that comes after a collective of `ids` (of one rank, in order):
    the first such one.

    That a communicator runs its collectives one after the other is no wait and does not
    count.
    """
    known: dict[int, Op] = {}
    found: dict[int, Op] = {}
    for g in ids:
        op = graph.ops[g]
        before = [graph.last_host[g], *(g - op.index + a for a in op.after)]
        if op.stream == op.launch_stream:
            before.append(graph.previous[g])
        for d in before:
            if d in known:
                found[g] = known[d]
        if op.collective is not None:
            known[g] = op
        elif g in found:
            known[g] = found[g]
    return found


# -- happens-before


@dataclass(slots=True)
class Clocks:
    """Vector clocks over the lanes of all recorded ranks, by operator id.

    A lane is a stream, a communicator's stream or a CPU. An operator *knows* how far
    every lane had got when it started. Knowledge travels along stream order,
    communicator order, `after` (events, stream waits, works), from a host wait to all
    later launches, and across ranks through collectives: nobody leaves one before all
    have entered it. A collective itself counts from its start on its own rank (then it
    may read and write) until its end there.
    """

    lane: list[int]  # of each operator, a running number over all ranks
    place: list[int]  # of each operator in its lane, from 1
    # when it started, the place up to which each lane had ended. The entry of its own
    # lane may lag behind: there, `place` decides
    known: list[list[int]]
    steps: list[tuple[int, ...]]  # the order of the walk, see `Graph.walk`
    waits_for: list[int]  # see `Graph.walk`

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
