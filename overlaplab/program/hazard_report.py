"""What people read about a hazard: both accesses, when, where, the missing edge.

Knows no streams' order: hazards.py and reuse.py found out.
"""

from __future__ import annotations

from collections.abc import Mapping

from overlaplab.program.access import overlap
from overlaplab.program.graph import Graph, describe
from overlaplab.program.hazards import Hazard, Use
from overlaplab.program.record import Access, Finding, Op, Program
from overlaplab.timeline import Timeline
from overlaplab.timeline.span import CPU_LANE

Times = Mapping[tuple[int, int], tuple[int, int]]  # rank, op -> start_ns, end_ns


def times_of(timeline: Timeline | None) -> Times:
    """When each operator ran, by rank and index; nothing without a timeline."""
    if timeline is None:
        return {}
    return {
        (span.rank, span.attributes["op"]): (span.start_ns, span.end_ns)
        for span in timeline.spans
        if span.kind != "launch" and "op" in span.attributes
    }


def tell(graph: Graph, hazards: list[Hazard], times: Times) -> Finding:
    """One finding for hazards of one cause; the first is told in full."""
    hazard = hazards[0]
    one, other = hazard.one, hazard.other
    first, second = graph.ops[one.g], graph.ops[other.g]
    name = tensor_name(graph.program, first if hazard.is_reuse else second, one.access)
    told = repr(name) if name else _unnamed(graph, first.rank, one.access)
    storages = {h.one.access.storage for h in hazards}
    if len(storages) > 1:
        told += f" (and {len(storages) - 1} more tensors)"
    if hazard.is_reuse:
        what = f"the memory of {told} is handed out again while it may still be used."
        owner = f", now {_new_owner(graph, second, other.access)}"
        repair = _repair_reuse(graph, hazard)
    else:
        has_cpu = CPU_LANE in (first.stream, second.stream)
        users = "a stream and the CPU" if has_cpu else "two streams"
        what = f"{users} use {told}, and nothing orders them."
        owner = ""
        repair = _repair(graph, hazard)
    message = (
        f"hazard: on rank {first.rank} {what}\n"
        f"  first {_verb(one)}: {where(first, times)}\n"
        f"  then {_verb(other)}: {where(second, times)}{owner}\n"
        f"  Missing: {_told(second)} does not wait for {_told(first)}."
        f"{_luck(first, second, times)}\n"
        f"  Repair: {repair}"
    )
    ops = (first.index, second.index)
    return Finding("hazard", first.rank, message, ops, one.access.storage, name)


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


def where(op: Op, times: Times | None = None) -> str:
    """ "mm on stream 'default', 1.000 to 2.500 us, op 3 [lab.py:12 in train]"."""
    label = f", {op.label}" if op.label and not op.collective else ""
    source = f" [{_source(op)}]" if op.source else ""
    name = describe(op) if op.collective else op.name
    time = (times or {}).get((op.rank, op.index))
    when = "" if time is None else f", {_us(time[0])} to {_us(time[1])} us"
    lane = "the CPU" if op.stream == CPU_LANE else f"stream {op.stream!r}"
    return f"{name} on {lane}{when}, op {op.index}{label}{source}"


def _unnamed(graph: Graph, rank: int, access: Access) -> str:
    """A tensor without a name is known by the operator that made it."""
    for op in graph.program.ranks[rank]:
        if any(write.storage == access.storage for write in op.writes):
            source = f" [{_source(op)}]" if op.source else ""
            return f"the result of {_told(op)}{source}"
    return f"storage {access.storage}"


def _new_owner(graph: Graph, op: Op, access: Access) -> str:
    name = tensor_name(graph.program, op, access)
    return f"memory of {name!r}" if name else "memory of another tensor"


def _luck(first: Op, second: Op, times: Times) -> str:
    """A hazard that this run's timing hides is one on other hardware."""
    one, other = (times.get((op.rank, op.index)) for op in (first, second))
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
    if first.kind == "communication":
        launcher = second.launch_stream
        if second.stream == CPU_LANE:
            return (
                f"wait() for the work of {_told(first)} and synchronize the stream "
                f"that waited before the CPU {doing} it."
            )
        return (
            f"call wait() on the work of {_told(first)} while stream {launcher!r} is "
            f"current, before {_told(second)} is launched."
        )
    if second.stream == CPU_LANE:
        return (
            f"record an event on stream {first.stream!r} after {_told(first)} and "
            f"synchronize with it before the CPU {doing} it."
        )
    return (
        f"let stream {second.launch_stream!r} wait (wait_stream, or wait_event with an "
        f"event recorded on {first.stream!r} after {_told(first)}) before "
        f"{_told(second)} is launched."
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
            f"the new memory, before {_told(second)} is launched."
        )
    return (
        f"keep a reference until stream {owner!r}, which allocated it, waits for "
        f"{_told(first)}; or call record_stream on the tensor, with stream {user!r}, "
        "before you drop it."
    )


def _source(op: Op) -> str:
    """The line of the launch; in the backward pass also that of the forward."""
    line = op.attributes.get("forward", "")
    return f"{op.source}, backward of {line}" if line else op.source


def _verb(use: Use) -> str:
    return "written" if use.writes else "read"


def _told(op: Op) -> str:
    return describe(op) if op.collective else f"{op.name} (op {op.index})"


def _us(time_ns: int) -> str:
    return f"{time_ns / 1000:.3f}"
