"""What a recorded step did with its slots: gathers, uses, and who holds what when.

A gather is known by the bytes that it sends, never by its number: the marks of a shard
are followed through copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from overlaplab.grading.provenance import Ledger
from overlaplab.hardware import Hardware, Link, collective_ns, find_hardware
from overlaplab.program import Access, Op, Program
from overlaplab.program.times import Times
from overlaplab.timeline import Span, Timeline

_SHARD = "shard of layer "


# One byte a nanosecond and no latency: `collective_ns` then counts bytes.
_COUNTER: Hardware = replace(
    find_hardware("chalk"), link=Link(latency_ns=0, bytes_per_s=10**9)
)


def wire_bytes(op: Op) -> int:
    """Bytes that cross one rank's link in a collective, 0 for any other operator."""
    sent = op.collective
    if sent is None:
        return 0
    return collective_ns(_COUNTER, sent.operation, len(sent.ranks), sent.bytes)[1]


@dataclass(frozen=True, slots=True)
class Gather:
    """One all-gather of a rank, and of which layer (None: of several, or of none)."""

    op: Op
    layer: int | None

    @property
    def bytes(self) -> int:
        """What it brings."""
        return self.op.collective.bytes if self.op.collective else 0

    @property
    def place(self) -> tuple[int, int]:
        """Storage and first byte of what it fills."""
        first = self.op.writes[0]
        return first.storage, first.offset_bytes


def find_gathers(program: Program, rank: int) -> list[Gather]:
    """The all-gathers of a rank, in its order."""
    ledger, found = Ledger(), []
    names = [n for n in program.names if n.rank == rank and n.name.startswith(_SHARD)]
    for op in program.ranks[rank]:
        for name in names:
            if name.since == op.index:
                ledger.name(name.access, int(name.name.removeprefix(_SHARD)))
        if op.collective is None:
            ledger.step(op)
            continue
        layers = {mark.gradient for mark in ledger.send(op).fresh}
        if op.collective.operation == "all_gather":
            found.append(Gather(op, layers.pop() if len(layers) == 1 else None))
    return found


@dataclass(frozen=True, slots=True)
class Use:
    """One layer computes, in one pass.

    Args:
        label: "forward layer 3".
        ops: its operators, by index.
    """

    label: str
    ops: tuple[int, ...]

    @property
    def layer(self) -> int:
        """Which."""
        return int(self.label.rsplit(" ", 1)[1])

    @property
    def short(self) -> str:
        """As in the drawings: "F3"."""
        return f"{self.label[0].upper()}{self.layer}"


def find_uses(program: Program, rank: int) -> list[Use]:
    """The uses of a rank, in the order in which they were launched."""
    found: dict[str, list[int]] = {}
    for op in program.ranks[rank]:
        if op.label.startswith(("forward layer ", "backward layer ")):
            found.setdefault(op.label, []).append(op.index)
    return [Use(label, tuple(ops)) for label, ops in found.items()]


def find_overwritten(program: Program, rank: int) -> Iterator[tuple[Gather, Use]]:
    """Gathers that are launched into a slot before the layer in it has computed.

    Each with the use that reads the slot after it, in the order of the uses.
    """
    gathers = find_gathers(program, rank)
    for use in find_uses(program, rank):
        before = [g for g in gathers if g.op.index < use.ops[0]]
        own = [g for g in before if g.layer == use.layer]
        for gather in before[before.index(own[-1]) + 1 :] if own else ():
            if gather.place == own[-1].place:
                yield gather, use


def count_ahead(program: Program, rank: int) -> int:
    """The most gathers that are launched before some layer computes, beside its own."""
    launched = [gather.op.index for gather in find_gathers(program, rank)]
    uses = find_uses(program, rank)
    return max(
        sum(index < use.ops[0] for index in launched) - number
        for number, use in enumerate(uses, start=1)
    )


# -- pictures


def with_ring(program: Program, timeline: Timeline) -> Timeline:
    """Rank 0's timeline with a lane for each slot: when it is filled, when used.

    Buffers of gradients have a lane each, too. A race makes two lanes of each.

    Spans are called by their layer: G3 is the gather of layer 3, F3 and B3 its forward
    and backward, S3 sends its gradient.
    """
    own = timeline.of_rank(0)
    times = Times(program, own)
    gathers = find_gathers(program, 0)
    names = {g.op.index: "G" if g.layer is None else f"G{g.layer}" for g in gathers}
    uses = find_uses(program, 0)
    for use in uses:
        names |= {op: use.short for op in use.ops}
    names |= dict(_scatters(program, uses))
    spans = tuple(_renamed(span, names) for span in own.spans)
    slots = _slot_spans(program, times, gathers, uses)
    lanes = (*slots, *_buffer_spans(program, times, uses))
    return replace(
        own,
        spans=(*spans, *lanes),
        causes=(*own.causes, *[None] * len(lanes)) if own.causes else (),
    )


def _scatters(program: Program, uses: Sequence[Use]) -> Iterator[tuple[int, str]]:
    """Reduce-scatters in their order, named by the backward before them."""
    backwards = [use for use in uses if use.label.startswith("backward")]
    for op in program.ranks[0]:
        if op.collective is None or op.collective.operation != "reduce_scatter":
            continue
        before = [use for use in backwards if use.ops[-1] < op.index]
        yield op.index, f"S{before[-1].layer}" if before else "S"


def _renamed(span: Span, names: dict[int, str]) -> Span:
    op = span.attributes.get("op")
    if op not in names:
        return span
    launch = "launch " if span.kind == "launch" else ""
    return replace(span, name=launch + names[op])


def _slot_spans(
    program: Program, times: Times, gathers: Sequence[Gather], uses: Sequence[Use]
) -> Iterator[Span]:
    places = list(dict.fromkeys(gather.place for gather in gathers))
    if len(places) > _MOST_LANES:
        return
    filled, read = [], []
    for gather in gathers:
        if gather.op.collective is None or gather.layer is None:
            continue
        lane = f"slot {places.index(gather.place)}"
        span = times.of(gather.op)
        if span is not None:
            filled.append(Span(0, lane, "communication", f"G{gather.layer}", *span))
        read += [
            _use_span(lane, use, times)
            for use in _readers(program, gather, gathers, uses)
        ]
    yield from _apart(filled, read, "read")


def _readers(
    program: Program, gather: Gather, gathers: Sequence[Gather], uses: Sequence[Use]
) -> Iterator[Use]:
    """The uses of its layer that read what a gather filled, until it is overwritten."""
    ops = program.ranks[0]
    later = [g.op.index for g in gathers if g.place == gather.place]
    until = min((i for i in later if i > gather.op.index), default=len(ops))
    for use in uses:
        between = (i for i in use.ops if gather.op.index < i < until)
        reads = [i for i in between if _touches(ops[i].reads, gather.op.writes)]
        if use.layer == gather.layer and reads:
            yield use


def _buffer_spans(
    program: Program, times: Times, uses: Sequence[Use]
) -> Iterator[Span]:
    """Buffers of gradients: when a backward writes one and when it is sent."""
    scatters = [
        (program.ranks[0][index], name) for index, name in _scatters(program, uses)
    ]
    places = list(dict.fromkeys(_place(op) for op, _ in scatters))
    if len(places) > _MOST_LANES:
        return
    before, sent, written = -1, [], []
    for op, name in scatters:
        lane = f"buffer {places.index(_place(op))}"
        for use in uses:
            between = (i for i in use.ops if before < i < op.index)
            ops = [program.ranks[0][i] for i in between]
            if any(_touches(each.writes, op.reads) for each in ops):
                written.append(_use_span(lane, use, times))
        span = times.of(op)
        if span is not None:
            sent.append(Span(0, lane, "communication", name, *span))
        before = op.index
    yield from _apart(sent, written, "written")


def _place(op: Op) -> tuple[int, int]:
    return op.reads[0].storage, op.reads[0].offset_bytes


def _use_span(lane: str, use: Use, times: Times) -> Span:
    start, end = times.start(0, use.ops[0]), times.end(0, use.ops[-1])
    return Span(0, lane, "compute", use.short, start, end)


def _apart(messages: list[Span], uses: list[Span], verb: str) -> list[Span]:
    """In one lane, but in a race uses have another, or bars would cover each other."""
    if any(_overlap(message, use) for message in messages for use in uses):
        uses = [replace(use, lane=f"{use.lane}, {verb}") for use in uses]
    return sorted((*messages, *uses), key=lambda span: (span.lane, span.start_ns))


def _overlap(one: Span, other: Span) -> bool:
    same = one.lane == other.lane
    return same and max(one.start_ns, other.start_ns) < min(one.end_ns, other.end_ns)


_MOST_LANES = 8


def _touches(these: Sequence[Access], those: Sequence[Access]) -> bool:
    """Whether any of `these` begins inside what `those` of one storage span."""
    storage, first = those[0].storage, those[0].offset_bytes
    size = sum(access.run_bytes for access in those)
    return any(
        access.storage == storage and first <= access.offset_bytes < first + size
        for access in these
    )
