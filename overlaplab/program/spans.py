"""From the resolver's lists to spans: their order, their attributes, their causes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlaplab.program.memory_timeline import memory_over_time
from overlaplab.timeline import Span, Timeline

if TYPE_CHECKING:
    from overlaplab.program.resolve import Resolution


def timeline_of(run: Resolution) -> Timeline:
    """Spans in the order that `Timeline` promises, and their causes."""
    graph, num = run.graph, len(run.graph.ops)
    # (start, rank, lane, end, code); the code is an id, or id + num for its launch.
    rows: list[tuple[int, int, str, int, int]] = []
    for g, op in enumerate(graph.ops):
        if op.kind == "host_wait" or op.kind == "host":
            if run.end[g] > run.start[g]:
                rows.append((run.start[g], op.rank, "cpu", run.end[g], g))
            continue
        if run.launched[g] > run.launch_ns[g]:
            rows.append((run.launch_ns[g], op.rank, "cpu", run.launched[g], g + num))
        if run.end[g] >= 0:
            rows.append((run.start[g], op.rank, op.stream, run.end[g], g))
    rows.sort()
    place = {row[4]: index for index, row in enumerate(rows)}
    spans = tuple(_span(run, row) for row in rows)
    causes = tuple(
        place.get(run.cpu_cause[row[4] - num] if row[4] >= num else run.cause[row[4]])
        for row in rows
    )
    program = graph.program
    starts_ns = [
        [run.start[g] for g in graph.rank_ids(r)] for r in range(len(graph.base))
    ]
    return Timeline(
        spans,
        causes,
        num_ranks=len(program.ranks),
        represents=program.represents,
        origin="virtual",
        hardware=run.hw.name,
        memory=memory_over_time(program, starts_ns, max([0, *run.end])),
    )


def _span(run: Resolution, row: tuple[int, int, str, int, int]) -> Span:
    start, rank, lane, end, code = row
    num = len(run.graph.ops)
    g = code - num if code >= num else code
    op = run.graph.ops[g]
    attributes: dict[str, object] = {"op": op.index, "label": op.label}
    if op.phase:
        attributes["phase"] = op.phase
    if op.attributes:
        attributes.update(op.attributes)
    if code >= num:
        return Span(
            rank, lane, "launch", f"launch {op.name}", start, end, 0, 0, attributes
        )
    if op.kind == "host":
        return Span(rank, lane, "host", op.name, start, end, 0, 0, attributes)
    if op.kind == "host_wait":
        name = op.name if op.name.startswith("wait") else f"wait {op.name}"
        return Span(rank, lane, "host", name, start, end, 0, 0, attributes)
    if op.kind == "communication":
        m = run.graph.meeting[g]
        assert op.collective is not None
        attributes["ready_ns"] = run.ready[m]
        attributes["latency_ns"] = run.on_wire[m] - run.ready[m]
        attributes["wire_ns"] = end - run.on_wire[m]
        attributes["alone_ns"] = sum(run.costs.meetings[m])
        moved = op.collective.bytes
        return Span(
            rank, lane, "communication", op.name, start, end, moved, 0, attributes
        )
    attributes["alone_ns"] = run.alone[g]
    moved = op.read_bytes + op.write_bytes
    if op.kind == "memcpy":  # what is read here is written there
        moved = max(op.read_bytes, op.write_bytes)
    return Span(rank, lane, op.kind, op.name, start, end, moved, op.flops, attributes)
