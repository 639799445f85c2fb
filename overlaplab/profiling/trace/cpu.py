"""Rows of a file without devices -> spans: operators of the CPU, gloo's transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from overlaplab.profiling.events import LAUNCH_RANGE, NOT_OPERATORS, WAIT_RANGE
from overlaplab.profiling.trace.labels import Labels
from overlaplab.profiling.trace.messages import bytes_of_shapes
from overlaplab.profiling.trace.names import VIEWS, operation_of
from overlaplab.profiling.trace.tables import Ranges, Tables
from overlaplab.timeline import CPU_LANE, Span

# Composite operators are made of others that the trace has too: the operators inside
# count, under the names that a dispatch mode sees.
_TRANSPARENT = VIEWS | frozenset(
    """
    batch_norm contiguous conv1d conv2d conv3d cross_entropy_loss dropout einsum
    group_norm is_nonzero item layer_norm linear _local_scalar_dense log_softmax matmul
    nll_loss nll_loss_nd ones_like scaled_dot_product_attention softmax to zeros
    zeros_like
    """.split()  # noqa: SIM905 (prose, wrapped)
)


def cpu_spans(
    tables: Tables, labels: Labels, rank: int, shift_ns: int
) -> Iterator[Span]:
    """The outermost operators as computation, "gloo:..." ranges as communication, and
    the launches and waits that a run of the process pool marked."""
    for start, end, name, thread in _outermost_operators(tables.operators):
        attributes = labels.attributes(thread, start)
        start, end = start + shift_ns, end + shift_ns
        yield Span(rank, "default", "compute", name, start, end, 0, 0, attributes)
    annotations, operators = tables.annotations, tables.operators
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
    transfers = defaultdict(list)
    for table in (annotations, operators):
        for i, start, end, name, thread in table.rows(table.in_order()):
            if name.startswith("gloo:"):
                args = table.args.get(i)
                size = bytes_of_shapes(args) if args else 0
                operation = operation_of(name.removeprefix("gloo:"))
                transfers[operation].append((start, end, thread, size))
    for operation, of_operation in transfers.items():
        known = launches[operation]
        of_operation.sort(key=lambda transfer: transfer[0])
        for i, (start, end, thread, size) in enumerate(of_operation):
            attributes, lane = labels.attributes(thread, start), "comm"
            if len(known) == len(of_operation):
                group, attributes["sequence"], size, label = known[i]
                if label:
                    attributes["label"] = label
                if group != "default":
                    lane = f"comm:{group}"
            start, end = start + shift_ns, end + shift_ns
            yield Span(
                rank, lane, "communication", operation, start, end, size, 0, attributes
            )


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
