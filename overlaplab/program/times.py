"""When each operator of a program ran: from the spans of its timeline, read once.

The one place where spans are matched with operators: hazards, laws and reports ask it.
"""

from __future__ import annotations

from collections import defaultdict

from overlaplab.program.record import Op, Program
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import Interval


class Times:
    """The times of every operator, by rank and index; 0 where they are not known."""

    def __init__(self, program: Program, timeline: Timeline | None) -> None:
        self._program = program
        self._spans: dict[tuple[int, int], Span] = {}
        self._launches: dict[tuple[int, int], Span] = {}
        self._wire: dict[tuple[str, int], Interval] | None = None
        for span in () if timeline is None else timeline.spans:
            op = span.attributes.get("op")
            if op is not None:
                spans = self._launches if span.kind == "launch" else self._spans
                spans[span.rank, op] = span

    def of(self, op: Op) -> Interval | None:
        """[start, end) of `op`, None if that is not known."""
        span = self._spans.get((op.rank, op.index))
        return None if span is None else (span.start_ns, span.end_ns)

    def start(self, rank: int, op: int) -> int:
        span = self._spans.get((rank, op))
        return span.start_ns if span else 0

    def end(self, rank: int, op: int) -> int:
        span = self._spans.get((rank, op))
        return span.end_ns if span else 0

    def duration(self, rank: int, op: int) -> int:
        return self.end(rank, op) - self.start(rank, op)

    def launch_start(self, rank: int, op: int) -> int:
        """When the CPU began to launch `op`; its start where launches cost nothing."""
        span = self._launches.get((rank, op))
        return span.start_ns if span else self.start(rank, op)

    def launch_end(self, rank: int, op: int) -> int:
        span = self._launches.get((rank, op))
        return span.end_ns if span else 0

    def launch_ns(self, rank: int, op: int) -> int:
        span = self._launches.get((rank, op))
        return span.duration_ns if span else 0

    def wire(self, group: str, sequence: int) -> Interval:
        """[arrival of the last rank, last end) of a collective, (0, 0) if unknown."""
        if self._wire is None:
            self._wire = self._meet()
        return self._wire.get((group, sequence), (0, 0))

    def _meet(self) -> dict[tuple[str, int], Interval]:
        found: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        for ops in self._program.ranks:
            for op in ops:
                span = self._spans.get((op.rank, op.index))
                if op.collective is not None and span is not None:
                    ready = int(span.attributes.get("ready_ns", span.start_ns))
                    key = (op.collective.group, op.collective.sequence)
                    found[key].append((ready, span.end_ns))
        return {
            key: (max(r for r, _ in spans), max(e for _, e in spans))
            for key, spans in found.items()
        }
