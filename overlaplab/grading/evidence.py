"""What a run proves about its gradients, as data. Judges nothing.

`overlaplab.grading.reading` reads it from program and timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from overlaplab.grading.updates import UpdateEvidence, find_updates
from overlaplab.program import Collective, Program
from overlaplab.program.graph import (
    Graph,
    StreamOrder,
    build_graph,
    first_collectives,
)
from overlaplab.program.times import Times
from overlaplab.timeline import Timeline


@dataclass(frozen=True, slots=True)
class GradientEvidence:
    """One parameter's gradient in one step on one rank."""

    rank: int
    step: int  # counted from 1
    name: str  # the parameter's
    bytes: int  # its size
    writer: int | None  # index of the last operator that wrote it before any hook ran
    # where autograd copied it once more (a clone, because somebody holds the original),
    # the operator that made the original; else `writer`
    origin: int | None
    since: int  # index of the next operator when its hook ran
    ready_ns: int  # end of `writer`
    origin_ns: int  # end of `origin`
    sent_bytes: int  # how many of its bytes were sent in its step, with multiplicity
    # collectives that sent any byte of it, as indices of operators
    sends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendEvidence:
    """One collective on one rank."""

    rank: int
    step: int  # counted from 1; 0 is before the first
    op: int  # index of the operator
    group: str
    sequence: int  # in its group
    operation: str
    start_ns: int  # on the wire, which is when its last rank arrived
    end_ns: int
    own_start_ns: int  # start of its span on this rank
    bytes: int  # of its input on this rank
    # (parameter, bytes of its gradient of this step), first sent here
    covers: tuple[tuple[str, int], ...]
    # (parameter, bytes): an earlier step's gradient, or sent already
    stale: tuple[tuple[str, int], ...]
    other_bytes: int  # bytes that are no gradient's
    shared_bytes: int  # bytes that are another parameter's gradient, too
    # (parameter, indices of the learner's copies from its gradient to the collective's
    # input)
    packs: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def stale_bytes(self) -> int:
        return sum(size for _, size in self.stale)

    @property
    def pack(self) -> tuple[int, ...]:
        """Every copy from a gradient to the input, each once."""
        return tuple(sorted({op for _, ops in self.packs for op in ops}))


@dataclass(frozen=True, slots=True)
class BucketEvidence:
    """One bucket (a set of parameters) in one step; of all ranks the latest counts."""

    step: int  # which
    names: tuple[str, ...]  # of its parameters
    rank: int  # the one whose gradients were complete last
    ready_ns: int  # end of the last operator that wrote any gradient of it
    # end of what the gradients' stream held when its last hook ran: the first moment at
    # which something launched in that hook can start
    armed_ns: int
    pack_ns: int  # duration of the learner's own copies for it
    # end of the CPU's launches of copies and collective, if all are launched at once in
    # that hook
    launched_ns: int
    # start of the last collective that carries bytes of it, None if no byte of it is
    # sent
    start_ns: int | None


@dataclass(frozen=True)
class Evidence:
    """All evidence of one run; build it with `collect_evidence`."""

    program: Program
    timeline: Timeline
    # of every rank and step, in the order of their hooks
    gradients: tuple[GradientEvidence, ...]
    sends: tuple[SendEvidence, ...]  # every collective, by rank and program order
    marks: tuple[tuple[int, ...], ...]  # [rank]: first operator of step 1, 2, ...

    @property
    def num_ranks(self) -> int:
        return len(self.program.ranks)

    @property
    def num_steps(self) -> int:
        return min((len(marks) for marks in self.marks), default=0)

    @cached_property
    def times(self) -> Times:
        """Start and end of every operator."""
        return Times(self.program, self.timeline)

    @cached_property
    def _graph(self) -> Graph:
        return build_graph(self.program)

    def collectives_waited_for(self, rank: int, step: int) -> dict[int, Collective]:
        """For the operators of `step` that come after a collective of that step: the
        first such one."""
        base = self._graph.base[rank]
        ids = (base + index for index in self.ops_of(rank, step))
        found = first_collectives(self._graph, ids)
        return {g - base: op.collective for g, op in found.items() if op.collective}

    @cached_property
    def step_ns(self) -> tuple[int, ...]:
        """Time of each step: from the last end before it to its own, over all ranks."""
        before = min(
            (
                self.times.launch_start(rank, marks[0])
                for rank, marks in enumerate(self.marks)
                if marks and marks[0] < len(self.program.ranks[rank])
            ),
            default=0,
        )
        times = []
        for step in range(1, self.num_steps + 1):
            ends = [
                self.times.end(rank, op)
                for rank in range(self.num_ranks)
                for op in self.ops_of(rank, step)
            ]
            end = max(ends, default=before)
            times.append(end - before)
            before = end
        return tuple(times)

    @cached_property
    def updates(self) -> tuple[UpdateEvidence, ...]:
        """What was done to each parameter, by rank and step."""
        return find_updates(self.program, self.marks)

    @cached_property
    def live_bytes(self) -> tuple[tuple[int, ...], ...]:
        """`[rank][step - 1]`: bytes alive when the step's last operator was launched.

        What goes between that and the next step's first operator still counts.
        """
        rows = []
        for rank, marks in enumerate(self.marks):
            ends = (*marks[1:], len(self.program.ranks[rank]))
            lives = [s for s in self.program.storages if s.rank == rank]
            rows.append(
                tuple(
                    sum(
                        s.bytes
                        for s in lives
                        if s.born < end and (s.freed is None or s.freed >= end)
                    )
                    for end in ends
                )
            )
        return tuple(rows)

    def begin_ns(self, step: int) -> int:
        """The first start of anything of the step: where `step_timeline` begins."""
        starts = (
            self.times.launch_start(rank, ops[0])
            for rank in range(self.num_ranks)
            if (ops := self.ops_of(rank, step))
        )
        return min(starts, default=0)

    def ops_of(self, rank: int, step: int) -> range:
        """Indices of the operators of `step` on `rank`; step 0 is before the first."""
        marks = (0, *self.marks[rank], len(self.program.ranks[rank]))
        return range(marks[step], marks[step + 1])

    def step_timeline(self, step: int) -> Timeline:
        """The spans of one step, as a timeline of its own (causes unknown)."""
        wanted = [set(self.ops_of(rank, step)) for rank in range(self.num_ranks)]
        spans = [
            span
            for span in self.timeline.spans
            if span.rank < len(wanted)
            and span.attributes.get("op") in wanted[span.rank]
        ]
        return Timeline.of(spans, origin=self.timeline.origin)

    def sends_of(self, rank: int, step: int) -> tuple[SendEvidence, ...]:
        """The collectives that `rank` launched in `step`, in its order."""
        return tuple(s for s in self.sends if s.rank == rank and s.step == step)

    def gradients_of(
        self, rank: int, step: int, names: Sequence[str] | None = None
    ) -> tuple[GradientEvidence, ...]:
        """The gradients of `rank` in `step`; of the parameters `names`, if given."""
        return tuple(
            g
            for g in self.gradients
            if g.rank == rank and g.step == step and (names is None or g.name in names)
        )

    def bucket(self, names: Sequence[str], step: int) -> BucketEvidence | None:
        """The terms of the prompt law for the parameters `names` in `step`.

        None where no rank has a gradient for any of them in that step.
        """
        found = [
            _bucket_on_rank(self, rank, tuple(names), step)
            for rank in range(self.num_ranks)
        ]
        ranks = [bucket for bucket in found if bucket is not None]
        if not ranks:
            return None
        last = max(ranks, key=lambda bucket: bucket.ready_ns)
        starts = [b.start_ns for b in ranks if b.start_ns is not None]
        return BucketEvidence(
            step=step,
            names=tuple(names),
            rank=last.rank,
            ready_ns=last.ready_ns,
            armed_ns=max(b.armed_ns for b in ranks),
            pack_ns=max(b.pack_ns for b in ranks),
            launched_ns=max(b.launched_ns for b in ranks),
            start_ns=max(starts) if len(starts) == len(ranks) else None,
        )


def _bucket_on_rank(
    evidence: Evidence, rank: int, names: tuple[str, ...], step: int
) -> BucketEvidence | None:
    gradients = evidence.gradients_of(rank, step, names)
    gradients = tuple(g for g in gradients if g.bytes)
    if not gradients:
        return None
    times, ops = evidence.times, evidence.program.ranks[rank]
    order = StreamOrder(ops)
    last_hook = max(g.since for g in gradients)
    sends = [
        send
        for send in evidence.sends_of(rank, step)
        if any(name in names for name, _ in send.covers)
    ]
    own = sorted(
        {op for s in sends for name, via in s.packs if name in names for op in via}
    )
    streams_used = {ops[g.writer].stream for g in gradients if g.writer is not None}
    armed = max(
        (
            times.end(rank, last_hook if last is None else last)
            for last in (order.before(stream, last_hook) for stream in streams_used)
        ),
        default=0,
    )
    in_hook = [op for op in own if op >= last_hook]
    launched = times.launch_end(rank, last_hook - 1) if last_hook else 0
    launched += sum(times.launch_ns(rank, op) for op in in_hook)
    launched += sum(times.launch_ns(rank, s.op) for s in sends if s.op >= last_hook)
    last = max(sends, key=lambda send: (send.start_ns, send.op), default=None)
    return BucketEvidence(
        step=step,
        names=names,
        rank=rank,
        ready_ns=max(g.ready_ns for g in gradients),
        armed_ns=armed,
        pack_ns=sum(times.duration(rank, op) for op in own),
        launched_ns=launched,
        start_ns=None if last is None else last.start_ns,
    )
