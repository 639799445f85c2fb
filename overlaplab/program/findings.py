"""What a program should not have done: hazards, unwaited and unmatched collectives.

Exact and without time: two accesses to a byte, one of them a write, with no chain of
happens-before between them, are a hazard on every machine, also where the clock hides
it. No false alarms: any chain counts (see `graph.Clocks`). A message names both
accesses, when, where, and the missing edge.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlaplab.program.access import overlap
from overlaplab.program.graph import (
    Clocks,
    Graph,
    build_graph,
    compute_clocks,
    describe,
    list_ranks,
)
from overlaplab.program.hazards import Hazard, Use, find_unordered, touches_of
from overlaplab.program.record import Access, Finding, Op, Program
from overlaplab.program.reuse import find_reuses
from overlaplab.program.times import Times
from overlaplab.timeline import Timeline
from overlaplab.timeline.span import CPU_LANE


def find_findings(
    program: Program, timeline: Timeline | None = None
) -> tuple[Finding, ...]:
    """All findings of `program`: unmatched, unwaited, hazards; by rank and operator.

    One hazard is reported for each collective and stream that get in each other's way
    (or each storage and pair of streams, where no collective is involved): the first,
    with the number of other tensors.

    Args:
        program: the record.
        timeline: of the same program: with it, hazards say when both accesses ran.
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
        recorded = range(len(graph.program.ranks))
        missing = [r for r in op.collective.ranks if r in recorded and r not in came]
        yield Finding(
            "unmatched",
            op.rank,
            f"unmatched: {_where(op)} was launched by {list_ranks(came)} and never by "
            f"{list_ranks(missing)}.\n  On GPUs it never ends.\n"
            f"  Repair: launch it on every rank of process group "
            f"{op.collective.group!r} or on none.",
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
            "call its wait() on the stream that uses the result"
            f"{of_reducers(left[0].label)}.",
            tuple(op.index for op in left),
        )


def of_reducers(label: str) -> str:
    """What else repairs a work that nobody waited for, launched under `label`."""
    return "; if a reducer launched it, reducer.wait()" if "bucket" in label else ""


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
    times = Times(graph.program, timeline)
    for hazards in sorted(
        found.values(), key=lambda h: (h[0].other.g, h[0].one.g, h[0].is_reuse, len(h))
    ):
        yield _report(graph, hazards, times)


def _cause(graph: Graph, clocks: Clocks, hazard: Hazard) -> tuple[object, ...]:
    """What is reported as one hazard."""
    one, other = hazard.one, hazard.other
    first = graph.ops[one.g]
    lanes = sorted((clocks.lane[one.g], clocks.lane[other.g]))
    if hazard.is_reuse:  # a loop makes the same mistake again and again
        return ("reuse", *lanes, first.name, first.source)
    for use, partner in ((one, other), (other, one)):
        if graph.ops[use.g].kind == "communication":
            return ("collective", use.g, clocks.lane[partner.g])
    return ("storage", first.rank, one.access.storage, *lanes)


# -- what people read about a hazard


def _report(graph: Graph, hazards: list[Hazard], times: Times) -> Finding:
    """One finding for hazards of one cause; the first is described in full."""
    hazard = hazards[0]
    one, other = hazard.one, hazard.other
    first, second = graph.ops[one.g], graph.ops[other.g]
    name = _tensor_name(graph.program, first if hazard.is_reuse else second, one.access)
    tensor = repr(name) if name else _unnamed(graph, first.rank, one.access)
    storages = {h.one.access.storage for h in hazards}
    if len(storages) > 1:
        tensor += f" (and {len(storages) - 1} more tensors)"
    if hazard.is_reuse:
        what = f"the memory of {tensor} is handed out again while it may still be used."
        owner = f", now {_new_owner(graph, second, other.access)}"
        repair = _repair_reuse(graph, hazard)
    else:
        has_cpu = CPU_LANE in (first.stream, second.stream)
        users = "a stream and the CPU" if has_cpu else "two streams"
        what = f"{users} use {tensor}, and nothing orders them."
        owner = ""
        repair = _repair(graph, hazard)
    message = (
        f"hazard: on rank {first.rank} {what}\n"
        f"  first {_verb(one)}: {_where(first, times)}\n"
        f"  then {_verb(other)}: {_where(second, times)}{owner}\n"
        f"  Missing: {_named(second)} does not wait for {_named(first)}."
        f"{_luck(first, second, times)}\n"
        f"  Repair: {repair}"
    )
    ops = (first.index, second.index)
    return Finding("hazard", first.rank, message, ops, one.access.storage, name)


def _tensor_name(program: Program, op: Op, access: Access) -> str:
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


def _where(op: Op, times: Times | None = None) -> str:
    """ "mm on stream 'default', 1.000 to 2.500 us, op 3 [lab.py:12 in train]"."""
    label = f", {op.label}" if op.label and not op.collective else ""
    source = f" [{_source(op)}]" if op.source else ""
    name = describe(op) if op.collective else op.name
    time = None if times is None else times.of(op)
    when = "" if time is None else f", {_us(time[0])} to {_us(time[1])} us"
    lane = "the CPU" if op.stream == CPU_LANE else f"stream {op.stream!r}"
    return f"{name} on {lane}{when}, op {op.index}{label}{source}"


def _unnamed(graph: Graph, rank: int, access: Access) -> str:
    """A tensor without a name is known by the operator that made it."""
    for op in graph.program.ranks[rank]:
        if any(write.storage == access.storage for write in op.writes):
            source = f" [{_source(op)}]" if op.source else ""
            return f"the result of {_named(op)}{source}"
    return f"storage {access.storage}"


def _new_owner(graph: Graph, op: Op, access: Access) -> str:
    name = _tensor_name(graph.program, op, access)
    return f"memory of {name!r}" if name else "memory of another tensor"


def _luck(first: Op, second: Op, times: Times) -> str:
    """A hazard that this run's timing hides is one on other hardware."""
    one, other = times.of(first), times.of(second)
    if one is None or other is None:
        return ""
    if other[1] < one[0]:
        return f" Here it comes first: it ends {_us(one[0] - other[1])} us earlier."
    if other[0] < one[1]:
        together = min(one[1], other[1]) - max(one[0], other[0])
        return f" Here they run together for {_us(together)} us."
    return f" Here it starts {_us(other[0] - one[1])} us later, by luck."


def _repair(graph: Graph, hazard: Hazard) -> str:
    first, second = graph.ops[hazard.one.g], graph.ops[hazard.other.g]
    doing = "writes" if hazard.other.writes else "reads"
    if first.collective is not None and first.collective.async_op:
        launcher = second.launch_stream
        if second.stream == CPU_LANE:
            return (
                f"wait() for the work of {_named(first)} and synchronize the stream "
                f"that waited before the CPU {doing} it."
            )
        return (
            f"call wait() on the work of {_named(first)} while stream {launcher!r} is "
            f"current, before {_named(second)} is launched."
        )
    if second.stream == CPU_LANE:
        return (
            f"record an event on stream {first.stream!r} after {_named(first)} and "
            f"synchronize with it before the CPU {doing} it."
        )
    return (
        f"let stream {second.launch_stream!r} wait (wait_stream, or wait_event with an "
        f"event recorded on {first.stream!r} after {_named(first)}) before "
        f"{_named(second)} is launched."
    )


def _repair_reuse(graph: Graph, hazard: Hazard) -> str:
    first, second = graph.ops[hazard.one.g], graph.ops[hazard.other.g]
    owner = next(
        life.stream
        for life in graph.program.storages
        if life.rank == first.rank and life.storage == hazard.one.access.storage
    )
    user = first.launch_stream
    if first.kind == "communication":
        waiting = [
            w.stream
            for w in graph.program.waits
            if w.rank == first.rank and w.op == first.index
        ]
        user = waiting[0] if waiting else user
    if first.stream == owner:
        return (
            f"let stream {second.launch_stream!r} wait for {owner!r}, which allocated "
            f"the new memory, before {_named(second)} is launched."
        )
    return (
        f"keep a reference until stream {owner!r}, which allocated it, waits for "
        f"{_named(first)}; or call record_stream on the tensor, with stream {user!r}, "
        "before you drop it."
    )


def _source(op: Op) -> str:
    """The line of the launch; in the backward pass also that of the forward."""
    line = op.attributes.get("forward", "")
    return f"{op.source}, backward of {line}" if line else op.source


def _verb(use: Use) -> str:
    return "written" if use.writes else "read"


def _named(op: Op) -> str:
    return describe(op) if op.collective else f"{op.name} (op {op.index})"


def _us(time_ns: int) -> str:
    return f"{time_ns / 1000:.3f}"
