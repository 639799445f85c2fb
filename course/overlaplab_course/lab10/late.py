"""Why a prefetcher of lab 10 is slower than ours: what starts late on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

from overlaplab.grading.violation import Violation, ms
from overlaplab.program import Program
from overlaplab.program.times import Times
from overlaplab.timeline import Timeline
from overlaplab_course.lab10.ring import find_gathers, find_uses

_WAIT_FOR_ONE = """\
your layers wait for gathers of later layers: wait for one gather, by its work or an \
event. wait_stream() takes all that the stream holds, and a gather without \
async_op=True is waited for at once"""


def waits_for_later(program: Program, timeline: Timeline) -> Iterator[Violation]:
    """Uses that start when another's gather ends: their own weights were there."""
    times = Times(program, timeline)
    gathers = find_gathers(program, 0)
    ends = {g.op.index: times.end(0, g.op.index) for g in gathers}
    computed = 0
    for use in find_uses(program, 0):
        start = times.start(0, use.ops[0])
        own = [g for g in gathers if g.layer == use.layer and g.op.index < use.ops[0]]
        mine = own[-1:] if use.short.startswith("B") else own[:1]
        could = max([computed, *(ends[g.op.index] for g in mine)])
        for gather in gathers if start > could + 2_000 else ():
            if gather not in own and abs(ends[gather.op.index] - start) <= 2_000:
                yield Violation(
                    "later",
                    f"{use.short} could start at {ms(could)}; it starts at "
                    f"{ms(start)}, when G{gather.layer} has ended",
                    f"{use.short} waits for G{use.layer} and what computes before it",
                    _WAIT_FOR_ONE,
                )
        computed = max(times.end(0, op) for op in use.ops)


def starts_late(
    program: Program, timeline: Timeline, depth: int
) -> Iterator[Violation]:
    """Gathers that start after their slot is free and the wire is."""
    times = Times(program, timeline)
    uses = find_uses(program, 0)
    ends = [max(times.end(0, op) for op in use.ops) for use in uses]
    gathers = iter(find_gathers(program, 0))
    slack = max(2_000, timeline.step_ns // 100)
    for k, use in enumerate(uses):
        gather = next((g for g in gathers if g.layer == use.layer), None)
        if gather is None or gather.op.collective is None:
            return
        group, sequence = gather.op.collective.group, gather.op.collective.sequence
        before = times.wire(group, sequence - 1)[1] if sequence else 0
        free = ends[k - depth - 1] if k > depth else 0
        start = times.start(0, gather.op.index)
        if start > max(before, free) + slack:
            what = (
                f"for the {use.label} a slot was free from {ms(free)}, the wire from "
                f"{ms(before)}; its gather started at {ms(start)}"
            )
            expected = f"it starts by {ms(max(before, free) + slack)}"
            yield Violation("prompt", what, expected)
