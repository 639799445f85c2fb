"""Pictures of slots: which batch is in which, from when it is filled until it is read.

Follows batches through the record: a name for a fill ("fill 2"), a copy and a step, and
a lane for each slot of the host's and of the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from overlaplab.program import Op, Program
from overlaplab.program.times import Times
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.span import Kind
from overlaplab_course.lab03.jobs import SET_UP

BATCH = "batch "
_SLOTS = ("pinned A", "pinned B", "device A", "device B")


def named(program: Program, rank: int) -> tuple[Op, ...]:
    """The operators of a rank; fills and copies are labelled by their batch."""
    holds = {
        name.access.storage: name.name.removeprefix(BATCH)
        for name in program.names
        if name.rank == rank and name.name.startswith(BATCH)
    }
    ops = []
    for op in program.ranks[rank]:
        word = {"host": "fill", "memcpy": "copy"}.get(op.kind, "")
        numbers = [holds[a.storage] for a in op.reads if a.storage in holds]
        ours = op.label == SET_UP or op.label.startswith("step ")
        if word and numbers and op.writes and not ours:
            op = replace(op, label=f"{word} {numbers[0]}")
            holds |= {access.storage: numbers[0] for access in op.writes}
        ops.append(op)
    return tuple(ops)


def with_slots(program: Program, timeline: Timeline) -> Timeline:
    """Rank 0's timeline with labels for names, and a lane for each slot in use."""
    own = timeline.of_rank(0)
    spans = tuple(_renamed(span) for span in own.spans)
    slots = tuple(_slot_spans(program, Times(program, own)))
    causes = (*own.causes, *[None] * len(slots)) if own.causes else ()
    return replace(own, spans=(*spans, *slots), causes=causes)


def _renamed(span: Span) -> Span:
    """A fill, copy or step by its label; a wait keeps its name."""
    label = str(span.attributes.get("label", ""))
    if span.kind == "launch" or span.name.startswith("wait") or not label:
        return span
    return replace(span, name=label)


def _slot_spans(program: Program, times: Times) -> Iterator[Span]:
    """One span for each fill, copy and step, in the lane of each slot it touches."""
    slots = {
        name.access.storage: name.name
        for name in program.names
        if name.rank == 0 and name.name in _SLOTS
    }
    found: dict[tuple[str, str], list[Op]] = {}
    for op in program.ranks[0]:
        for access in (*op.reads, *op.writes):
            if access.storage in slots and op.label[:4] in ("fill", "copy", "step"):
                found.setdefault((slots[access.storage], op.label), []).append(op)
    for (slot, label), ops in sorted(found.items()):
        begin = min(times.start(0, op.index) for op in ops)
        end = max(times.end(0, op.index) for op in ops)
        kinds: dict[str, Kind] = {"fill": "host", "copy": "memcpy", "step": "compute"}
        yield Span(0, slot, kinds[label[:4]], label, begin, end)
