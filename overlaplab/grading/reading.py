"""Read evidence from a run's program and timeline.

The learner is not asked: gradients are found through the names that the harness gave
them (`watch`), what a collective covers by following the learner's own copies; a
gradient that was reduced before it could be named is followed back (reduced.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overlaplab import streams
from overlaplab.grading.evidence import Evidence, GradientEvidence, SendEvidence
from overlaplab.grading.provenance import Ledger
from overlaplab.grading.reduced import Writes, before_reduction, last_writer
from overlaplab.grading.updates import PARAMETER
from overlaplab.program import Access, Op, Program, TensorName
from overlaplab.program.access import num_bytes
from overlaplab.program.steps import step_starts
from overlaplab.program.times import Times
from overlaplab.timeline import Timeline

# Autograd may hand a gradient on through one of these before it becomes `.grad`.
_HANDED_ON = {"clone", "_to_copy", "copy_"}


def watch(model: torch.nn.Module) -> None:
    """Name the parameters and, in a hook of its own, each gradient as it arrives.

    Call it on each rank before the learner's reducer registers its hooks: hooks run in
    the order of their registration.
    """
    for name, parameter in model.named_parameters():
        streams.name_tensor(parameter, PARAMETER + name)
    streams.name_gradients(model)


def collect_evidence(program: Program, timeline: Timeline) -> Evidence:
    """Read the evidence of a run that called `watch` and marked its steps.

    Args:
        program: the record, with the names that the harness gave and steps from 1.
        timeline: the same program, resolved; spans carry "op".
    """
    times, marks = Times(program, timeline), step_starts(program)
    gradients: list[GradientEvidence] = []
    sends: list[SendEvidence] = []
    for rank in range(len(program.ranks)):
        of_rank = _read_rank(program, times, rank, marks[rank])
        gradients += of_rank[0]
        sends += of_rank[1]
    return Evidence(program, timeline, tuple(gradients), tuple(sends), marks)


@dataclass(frozen=True, slots=True)
class _Named:
    """A gradient as named: where its bytes are, and from which operator on."""

    name: str
    step: int
    access: Access
    since: int
    writer: int | None
    origin: int | None
    origin_access: Access
    shares: int | None  # the place of another that was reduced together with this one


def _read_rank(
    program: Program, times: Times, rank: int, marks: Sequence[int]
) -> tuple[list[GradientEvidence], list[SendEvidence]]:
    ops = program.ranks[rank]
    names = [n for n in program.names if n.rank == rank]
    named = _named_gradients(ops, names, marks)
    by_index: dict[int, list[int]] = defaultdict(list)
    for number, gradient in enumerate(named):
        first = gradient.since if gradient.origin is None else gradient.origin + 1
        if gradient.shares is None:
            by_index[first].append(number)
    sharing: dict[int, list[int]] = defaultdict(list)
    for number, gradient in enumerate(named):
        sharing[number if gradient.shares is None else gradient.shares].append(number)

    ledger = Ledger(n.access.storage for n in names if n.name.startswith(PARAMETER))
    sends = []
    sent: dict[int, int] = defaultdict(int)
    senders: dict[int, dict[int, None]] = defaultdict(dict)
    for op in ops:
        for number in by_index.get(op.index, ()):
            ledger.name(named[number].origin_access, number)
        if op.collective is None:
            ledger.step(op)
            continue
        step = bisect_right(marks, op.index)
        cargo = ledger.send(op)
        covers: dict[str, int] = defaultdict(int)
        stale: dict[str, int] = defaultdict(int)
        packs: dict[str, set[int]] = defaultdict(set)
        shared = 0
        marked = (*cargo.fresh, *cargo.stale)
        for mark, number in ((m, n) for m in marked for n in sharing[m.gradient]):
            gradient = named[number]
            size = mark.high - mark.low
            current = gradient.step == step
            if current:
                sent[number] += size
                senders[number][op.index] = None
            if current and not mark.sent:
                covers[gradient.name] += size
                packs[gradient.name].update(mark.via)
                shared += mark.end - mark.start if number != mark.gradient else 0
            else:
                stale[gradient.name] += size
        group, sequence = op.collective.group, op.collective.sequence
        start_ns, end_ns = times.wire(group, sequence)
        sends.append(
            SendEvidence(
                rank=rank,
                step=step,
                op=op.index,
                group=group,
                sequence=sequence,
                operation=op.collective.operation,
                start_ns=start_ns,
                end_ns=end_ns,
                own_start_ns=times.start(rank, op.index),
                bytes=cargo.bytes,
                covers=tuple(covers.items()),
                stale=tuple(stale.items()),
                other_bytes=cargo.bytes - cargo.marked_bytes,
                shared_bytes=shared,
                packs=tuple((name, tuple(sorted(via))) for name, via in packs.items()),
            )
        )
    gradients = [
        GradientEvidence(
            rank=rank,
            step=g.step,
            name=g.name,
            bytes=num_bytes(g.access),
            writer=g.writer,
            origin=g.origin,
            since=g.since,
            ready_ns=0 if g.writer is None else times.end(rank, g.writer),
            origin_ns=0 if g.origin is None else times.end(rank, g.origin),
            sent_bytes=sent[number],
            sends=tuple(senders[number]),
        )
        for number, g in enumerate(named)
    ]
    return gradients, sends


def _named_gradients(
    ops: Sequence[Op], names: Sequence[TensorName], marks: Sequence[int]
) -> list[_Named]:
    writes: dict[int, list[int]] = defaultdict(list)
    arrivals: dict[int, list[int]] = defaultdict(list)  # with those of collectives
    for op in ops:
        for storage in dict.fromkeys(access.storage for access in op.writes):
            arrivals[storage].append(op.index)
            if op.collective is None:
                writes[storage].append(op.index)
    taken: dict[tuple[int | None, int, int], int] = {}
    named: list[_Named] = []
    for entry in names:
        if not entry.name.startswith(streams.GRADIENT):
            continue
        since = entry.since
        own = before_reduction(ops, arrivals, entry.access, since)
        writer = last_writer(ops, writes, entry.access, since)
        origin, access = _origin(ops, writes, writer, entry.access)
        if own is not None:
            writer, access = own
            origin, since = writer, writer + 1
        key = (origin, access.storage, access.offset_bytes)
        first = taken.get(key)  # of two parameters with one upstream gradient
        if first is not None and own is None:
            origin, access, first = writer, entry.access, None
            key = (origin, access.storage, access.offset_bytes)
        taken.setdefault(key, len(named))
        named.append(
            _Named(
                name=entry.name.removeprefix(streams.GRADIENT),
                step=bisect_right(marks, since),
                access=entry.access,
                since=since,
                writer=writer,
                origin=origin,
                origin_access=access,
                shares=first,
            )
        )
    return named


def _origin(
    ops: Sequence[Op],
    writes: Writes,
    writer: int | None,
    access: Access,
) -> tuple[int | None, Access]:
    """Follow the copies that autograd makes on the way into `.grad`."""
    if writer is None or ops[writer].name.split(".")[0] not in _HANDED_ON:
        return writer, access
    sources = [r for r in ops[writer].reads if r not in ops[writer].writes]
    if len(sources) != 1 or num_bytes(sources[0]) != num_bytes(access):
        return writer, access
    before = last_writer(ops, writes, sources[0], writer)
    return (writer, access) if before is None else (before, sources[0])
