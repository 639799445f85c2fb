"""What a program should not have done: hazards, unwaited and unmatched collectives.

Exact and without time: two accesses to a byte, one of them a write, with no chain of
happens-before between them, are a hazard on every machine, also where the clock hides
it. No false alarms: any chain counts (see `clocks`).
"""

from __future__ import annotations

from collections.abc import Iterator

from overlaplab.program.clocks import Clocks, compute_clocks
from overlaplab.program.graph import Graph, build_graph
from overlaplab.program.hazard_report import tell, times_of, where
from overlaplab.program.hazards import Hazard, find_unordered, touches_of
from overlaplab.program.record import Finding, Program
from overlaplab.program.reuse import find_reuses
from overlaplab.timeline import Timeline


def find_findings(
    program: Program, timeline: Timeline | None = None
) -> tuple[Finding, ...]:
    """All findings of `program`: unmatched, unwaited, hazards; by rank and operator.

    One hazard is told for each collective and stream that get in each other's way (or
    each storage and pair of streams, where no collective is involved): the first, with
    the number of other tensors.

    Args:
        program: the record.
        timeline: of the same program: with it, hazards tell when both accesses ran.
            It decides nothing.

    Raises:
        ProgramError: the program is not well-formed.
    """
    graph = build_graph(program)
    clocks = compute_clocks(graph)
    return (
        *_unmatched(graph),
        *_unwaited(graph, clocks),
        *_hazards(graph, clocks, timeline),
    )


# -- collectives that nobody met or waited for


def _unmatched(graph: Graph) -> Iterator[Finding]:
    for meeting in graph.meetings:
        if meeting.matched:
            continue
        op = graph.ops[meeting.members[0]]
        assert op.collective is not None
        came = [graph.ops[g].rank for g in meeting.members]
        missing = [r for r in op.collective.ranks if r not in came]
        yield Finding(
            "unmatched",
            op.rank,
            f"unmatched: {where(op)} was launched by {_ranks(came)} and never by "
            f"{_ranks(missing)}.\n  On GPUs it never ends.\n"
            f"  Repair: launch it on every rank of {op.collective.group!r} or on none.",
            (op.index,),
        )


def _unwaited(graph: Graph, clocks: Clocks) -> Iterator[Finding]:
    waited = {(w.rank, w.op) for w in graph.program.waits}
    for rank in range(len(graph.program.ranks)):
        ids = graph.rank_ids(rank)
        hosts = [g for g in ids if graph.ops[g].kind == "host_wait"]
        left = [
            graph.ops[g]
            for g in ids
            if (collective := graph.ops[g].collective) is not None
            and collective.async_op
            and not graph.unmatched(g)
            and (rank, graph.ops[g].index) not in waited
            and not (hosts and _cpu_knows(clocks, hosts[-1], g))
        ]
        if not left:
            continue
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        yield Finding(
            "unwaited",
            rank,
            f"unwaited: on rank {rank} nobody waits for {where(left[0])}{more}.\n"
            "  Its result may be read before it is there, and nothing says when its "
            "memory is free.\n"
            "  Repair: keep the work that the call with async_op=True returns, and "
            "call its wait() on the stream that uses the result.",
            tuple(op.index for op in left),
        )


def _cpu_knows(clocks: Clocks, host: int, g: int) -> bool:
    return clocks.waits_for[host] < 0 and clocks.before(g, host)


# -- hazards


def _hazards(
    graph: Graph, clocks: Clocks, timeline: Timeline | None
) -> Iterator[Finding]:
    touches = touches_of(graph, clocks)
    found: dict[tuple[object, ...], list[Hazard]] = {}
    for find in (find_unordered, find_reuses):
        for hazard in find(graph, clocks, touches):
            found.setdefault(_cause(graph, clocks, hazard), []).append(hazard)
    if not found:
        return
    times = times_of(timeline)
    for hazards in sorted(
        found.values(), key=lambda h: (h[0].other.g, h[0].one.g, h[0].is_reuse, len(h))
    ):
        yield tell(graph, hazards, times)


def _cause(graph: Graph, clocks: Clocks, hazard: Hazard) -> tuple[object, ...]:
    """What is told as one hazard."""
    one, other = hazard.one, hazard.other
    first = graph.ops[one.g]
    lanes = sorted((clocks.lane[one.g], clocks.lane[other.g]))
    if hazard.is_reuse:  # a loop makes the same mistake again and again
        return ("reuse", *lanes, first.name, first.source)
    for use, partner in ((one, other), (other, one)):
        if graph.ops[use.g].kind == "communication":
            return ("collective", use.g, clocks.lane[partner.g])
    return ("storage", first.rank, one.access.storage, *lanes)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
