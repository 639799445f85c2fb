"""Rows of a file without devices -> spans: operators of the CPU, gloo's transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from overlaplab.profiling.trace.labels import Labels
from overlaplab.profiling.trace.names import (
    COMPOSITES,
    LAUNCH_RANGE,
    NOT_OPERATORS,
    VIEWS,
    WAIT_RANGE,
    operation_of,
)
from overlaplab.profiling.trace.rows import bytes_of_shapes
from overlaplab.profiling.trace.tables import Ranges, Tables
from overlaplab.timeline import CPU_LANE, Span

_TRANSPARENT = VIEWS | COMPOSITES


def host_spans(
    tables: Tables, labels: Labels, rank: int, shift_ns: int
) -> Iterator[Span]:
    """The outermost operators and "gloo:..." ranges as what they are beside GPUs of
    which the file knows nothing: the host's, neither computation nor communication."""
    lanes: dict[Hashable, str] = {}
    for start, end, name, thread in _outermost_operators(tables.operators):
        attributes = labels.attributes(thread, start)
        lane = lanes.get(thread)
        if lane is None:  # the first is the one that trains
            lane = f"thread {attributes['thread']}" if lanes else CPU_LANE
            lanes[thread] = lane
        times = start + shift_ns, end + shift_ns
        yield Span(rank, lane, "host", name, *times, 0, 0, attributes)
    for operation, of_operation in _transfers(tables).items():
        for start, end, thread, size in of_operation:
            attributes = labels.attributes(thread, start)
            times = start + shift_ns, end + shift_ns
            yield Span(rank, "gloo", "host", operation, *times, size, 0, attributes)


def cpu_spans(
    tables: Tables, labels: Labels, rank: int, shift_ns: int
) -> Iterator[Span]:
    """Of a run on CPUs: the outermost operators as computation, "gloo:..." ranges as
    communication, and the launches and waits that the run marked."""
    for start, end, name, thread in _outermost_operators(tables.operators):
        attributes = labels.attributes(thread, start)
        start, end = start + shift_ns, end + shift_ns
        yield Span(rank, "default", "compute", name, start, end, 0, 0, attributes)
    annotations = tables.annotations
    launches = defaultdict(list)
    for _, start, end, name, _ in annotations.rows(annotations.in_order()):
        start, end = start + shift_ns, end + shift_ns
        if name.startswith(WAIT_RANGE):
            name = "wait " + name.removeprefix(WAIT_RANGE)
            yield Span(rank, CPU_LANE, "host", name, start, end)
        elif name.startswith(LAUNCH_RANGE):
            what = name.removeprefix(LAUNCH_RANGE)
            operation, group, sequence, num_bytes, label = what.split("|", 4)
            yield Span(rank, CPU_LANE, "launch", f"launch {operation}", start, end)
            launches[operation].append((group, int(sequence), int(num_bytes), label))
    # Gloo's threads take the works in the order of their launch.
    for operation, of_operation in _transfers(tables).items():
        known = launches[operation]
        for i, (start, end, thread, size) in enumerate(of_operation):
            attributes, lane = {**labels.attributes(thread, start)}, "comm"
            if len(known) == len(of_operation):
                group, attributes["sequence"], size, label = known[i]
                if label:
                    attributes["label"] = label
                if group != "default":
                    lane = f"comm:{group}"
            times = start + shift_ns, end + shift_ns
            about = (*times, size, 0, attributes)
            yield Span(rank, lane, "communication", operation, *about)


_Transfer = tuple[int, int, Hashable, int]  # start, end, thread, bytes


def _transfers(tables: Tables) -> dict[str, list[_Transfer]]:
    """Operation -> its "gloo:..." ranges, by start."""
    transfers: dict[str, list[_Transfer]] = defaultdict(list)
    for table in (tables.annotations, tables.operators):
        for i, start, end, name, thread in table.rows(table.in_order()):
            if name.startswith("gloo:"):
                args = table.args.get(i)
                size = bytes_of_shapes(args) if args else 0
                operation = operation_of(name.removeprefix("gloo:"))
                transfers[operation].append((start, end, thread, size))
    for of_operation in transfers.values():
        of_operation.sort(key=lambda transfer: transfer[0])
    return transfers


def _outermost_operators(
    operators: Ranges,
) -> Iterator[tuple[int, int, str, Hashable]]:
    """Operators that no other operator encloses; autograd's own events are glass."""
    end_ns: dict[Hashable, int] = {}
    for _, start, end, name, thread in operators.rows(operators.in_order()):
        if start < end_ns.get(thread, -1):
            continue
        if "::" not in name or name.startswith(NOT_OPERATORS):
            continue
        short = name.partition("::")[2]
        if short not in _TRANSPARENT:
            end_ns[thread] = end
            yield start, end, short, thread
