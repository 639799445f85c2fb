"""When each operator of a program ran. Knows no gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from overlaplab.program import Program
from overlaplab.timeline import Span, Timeline


class Clock:
    """When each operator of a program ran, from its timeline's spans."""

    def __init__(self, program: Program, timeline: Timeline) -> None:
        self._spans: dict[tuple[int, int], Span] = {}
        self._launches: dict[tuple[int, int], Span] = {}
        meetings: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for span in timeline.spans:
            op = span.attributes.get("op")
            if op is None:
                continue
            target = self._launches if span.kind == "launch" else self._spans
            target[span.rank, op] = span
        for ops in program.ranks:
            for op in ops:
                if op.collective is not None:
                    key = (op.collective.group, op.collective.sequence)
                    meetings[key].append((op.rank, op.index))
        self._wire = {key: self._meet(members) for key, members in meetings.items()}

    def _meet(self, members: Sequence[tuple[int, int]]) -> tuple[int, int]:
        spans = [self._spans[m] for m in members if m in self._spans]
        starts = [int(s.attributes.get("ready_ns", s.start_ns)) for s in spans]
        return max(starts, default=0), max((s.end_ns for s in spans), default=0)

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

    def wire(self, group: str, sequence: int) -> tuple[int, int]:
        """[arrival of the last rank, last end) of a meeting, (0, 0) if unknown."""
        return self._wire.get((group, sequence), (0, 0))
