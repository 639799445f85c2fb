"""What a program should not have done: hazards, unwaited and unmatched collectives.

Exact and without time: two accesses to a byte, one of them a write, with no chain of
happens-before between them, are a hazard on every machine, also where the clock hides
it. No false alarms: any chain counts (see `clocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overlaplab.program.access import overlap
from overlaplab.program.clocks import Clocks, compute_clocks
from overlaplab.program.graph import Graph, build_graph, describe
from overlaplab.program.record import Access, Finding, Op, Program


def find_findings(program: Program) -> tuple[Finding, ...]:
    """All findings of `program`: unmatched, unwaited, hazards; by rank and operator.

    One hazard is told for each collective and stream that get in each other's way (or
    each storage and pair of streams, where no collective is involved): the first, with
    the number of other tensors.

    Raises:
        ProgramError: the program is not well-formed.
    """
    graph = build_graph(program)
    clocks = compute_clocks(graph)
    return (
        *_unmatched(graph),
        *_unwaited(graph, clocks),
        *_hazards(graph, clocks),
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
            f"unmatched: {_where(op)} was launched by {_ranks(came)} and never by "
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
            f"unwaited: on rank {rank} nobody waits for {_where(left[0])}{more}.\n"
            "  Its result may be read before it is there, and nothing says when its "
            "memory is free.\n"
            "  Repair: keep the work that the call with async_op=True returns, and "
            "call its wait() on the stream that uses the result.",
            tuple(op.index for op in left),
        )


def _cpu_knows(clocks: Clocks, host: int, g: int) -> bool:
    return clocks.waits_for[host] < 0 and clocks.before(g, host)


# -- hazards


@dataclass(frozen=True, slots=True)
class _Use:
    """One access of one operator."""

    g: int
    access: Access
    writes: bool


def _hazards(graph: Graph, clocks: Clocks) -> Iterator[Finding]:
    found: dict[tuple[int, ...], list[tuple[_Use, _Use]]] = {}
    for uses in _shared_storages(graph, clocks):
        for one, other in _unordered(clocks, uses):
            found.setdefault(_key(graph, clocks, one, other), []).append((one, other))
    firsts = sorted(
        found.values(), key=lambda pairs: (pairs[0][1].g, pairs[0][0].g, len(pairs))
    )
    for pairs in firsts:
        yield _report(graph, pairs)


def _shared_storages(graph: Graph, clocks: Clocks) -> Iterator[list[_Use]]:
    """For each storage that several lanes use and one writes: its uses, in an order
    in which they may happen."""
    ops, lane = graph.ops, clocks.lane
    lanes: dict[tuple[int, int], int] = {}  # the one lane that uses it, -1 for several
    for g, op in enumerate(ops):
        for access in (*op.reads, *op.writes):
            key = (op.rank, access.storage)
            if lanes.setdefault(key, lane[g]) != lane[g]:
                lanes[key] = -1
    shared: dict[tuple[int, int], list[_Use]] = {
        key: [] for key, only in lanes.items() if only == -1
    }
    if not shared:
        return
    for step in clocks.steps:
        for g in step:
            op = ops[g]
            for accesses, writes in ((op.writes, True), (op.reads, False)):
                for access in accesses:
                    uses = shared.get((op.rank, access.storage))
                    if uses is not None:
                        uses.append(_Use(g, access, writes))
    yield from (uses for uses in shared.values() if any(u.writes for u in uses))


def _unordered(clocks: Clocks, uses: list[_Use]) -> Iterator[tuple[_Use, _Use]]:
    """Conflicting pairs with no happens-before, each in program order."""
    by_lane: dict[int, list[_Use]] = {}
    for use in uses:
        own = clocks.lane[use.g]
        for lane, earlier in by_lane.items():
            if lane == own:
                continue
            # Ordered by place: from the back until the first that is known to be over.
            known = clocks.known[use.g][lane]
            for old in reversed(earlier):
                if clocks.place[old.g] <= known:
                    break
                if (old.writes or use.writes) and overlap(old.access, use.access):
                    yield (old, use) if old.g < use.g else (use, old)
        by_lane.setdefault(own, []).append(use)


def _key(graph: Graph, clocks: Clocks, one: _Use, other: _Use) -> tuple[int, ...]:
    """What is told as one hazard."""
    for use, partner in ((one, other), (other, one)):
        if graph.ops[use.g].kind == "communication":
            return (0, use.g, clocks.lane[partner.g])
    lanes = sorted((clocks.lane[one.g], clocks.lane[other.g]))
    return (1, graph.ops[one.g].rank, one.access.storage, *lanes)


def _report(graph: Graph, pairs: list[tuple[_Use, _Use]]) -> Finding:
    one, other = pairs[0]
    first, second = graph.ops[one.g], graph.ops[other.g]
    name = tensor_name(graph.program, second, other.access)
    told = repr(name) if name else f"storage {other.access.storage}"
    storages = {use.access.storage for pair in pairs for use in pair}
    more = f" (and {len(storages) - 1} more tensors)" if len(storages) > 1 else ""
    message = (
        f"hazard: on rank {first.rank} two streams use {told}{more}, and nothing "
        "orders them.\n"
        f"  first {_verb(one)}: {_where(first)}\n"
        f"  then {_verb(other)}: {_where(second)}\n"
        f"  Missing: {_told(second)} does not wait for {_told(first)}.\n"
        f"  Repair: {_repair(first, second)}"
    )
    return Finding(
        "hazard",
        first.rank,
        message,
        (first.index, second.index),
        one.access.storage,
        name,
    )


def tensor_name(program: Program, op: Op, access: Access) -> str:
    """What the user calls the bytes of `access` at the time of `op`, "" if nothing."""
    named = [
        n
        for n in program.names
        if n.rank == op.rank and n.since <= op.index and overlap(n.access, access)
    ]
    if named:
        return max(named, key=lambda n: n.since).name
    for life in program.storages:
        if life.rank == op.rank and life.storage == access.storage and life.name:
            return life.name
    return ""


def _repair(first: Op, second: Op) -> str:
    if first.kind == "communication":
        launcher = second.launch_stream
        if second.stream == "cpu":
            return (
                f"wait for the work of {_told(first)} and synchronize before reading."
            )
        return (
            f"call wait() on the work of {_told(first)} while stream {launcher!r} is "
            f"current, before {_told(second)} is launched."
        )
    if second.stream == "cpu":
        return (
            f"record an event on stream {first.stream!r} after {_told(first)} and "
            "synchronize with it before the CPU reads."
        )
    return (
        f"let stream {second.launch_stream!r} wait (wait_stream, or wait_event with an "
        f"event recorded on {first.stream!r} after {_told(first)}) before "
        f"{_told(second)} is launched."
    )


def _verb(use: _Use) -> str:
    return "written" if use.writes else "read"


def _told(op: Op) -> str:
    return describe(op) if op.collective else f"{op.name} (op {op.index})"


def _where(op: Op) -> str:
    label = f", {op.label}" if op.label and not op.collective else ""
    source = f" [{op.source}]" if op.source else ""
    name = describe(op) if op.collective else op.name
    return f"{name} on stream {op.stream!r}, op {op.index}{label}{source}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
