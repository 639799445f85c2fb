"""The one chain of computing, sending, waiting and launching that a step is as long as.

The path is walked backwards from the last end, through `Timeline.causes` where they
are known and by the times where they are not (a measured run). Knows no hardware.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from overlaplab.timeline.meetings import find_meetings
from overlaplab.timeline.span import CPU_LANE, Span

Spans = Sequence[Span]
Causes = Sequence[int | None]  # as in `Timeline`; none where they are not known
Share = Literal["compute", "wire", "latency", "launch", "idle"]
SHARES: tuple[Share, ...] = ("compute", "wire", "latency", "launch", "idle")

_SHARE_OF: Mapping[str, Share] = {
    "compute": "compute",
    "memset": "compute",
    "memcpy": "wire",
    "communication": "wire",
    "launch": "launch",
    "host": "launch",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch [start_ns, end_ns) of the critical path."""

    start_ns: int
    end_ns: int
    share: Share  # what the step waits for in it
    # index in `Timeline.spans` of the span that it is a part of; for "idle", None
    span: int | None = None


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """What bounds a step: a chain of segments without gap, in order of time.

    - compute: a kernel computes (or sets memory) and the rest of the chain waits.
    - wire: bytes move: a collective from its latency to its end, or a host copy.
    - latency: a collective's fixed cost, from the moment when its last rank arrived.
    - launch: the CPU launches an operator or computes.
    - idle: nothing known runs on the chain.

    A wait of the CPU is no segment: the path goes on with what was waited for. Nor
    is the time in which a collective spins for its peers: the path goes on with what
    held up the last of them, on that rank.

    Args:
        segments: tile [first start, last end) of the whole timeline exactly.
    """

    segments: tuple[Segment, ...]

    @property
    def length_ns(self) -> int:
        """First start to last end over all ranks."""
        if not self.segments:
            return 0
        return self.segments[-1].end_ns - self.segments[0].start_ns

    @property
    def shares_ns(self) -> Mapping[Share, int]:
        """Nanoseconds of each share; they add up to `length_ns` exactly."""
        sums = dict.fromkeys(SHARES, 0)
        for segment in self.segments:
            sums[segment.share] += segment.end_ns - segment.start_ns
        return MappingProxyType(sums)

    @property
    def shares(self) -> Mapping[Share, float]:
        """Fractions of the path, `shares_ns` / `length_ns`: they add up to 1.

        All are 0.0 for an empty path.
        """
        length_ns = max(self.length_ns, 1)
        return MappingProxyType(
            {share: ns / length_ns for share, ns in self.shares_ns.items()}
        )


def critical_path(spans: Spans, causes: Causes) -> CriticalPath:
    """Walk back from the last end (the first such span in order) to the first start."""
    if not spans:
        return CriticalPath(())
    first_ns = min(s.start_ns for s in spans)
    last = max(range(len(spans)), key=lambda i: spans[i].end_ns)
    walk = _Walk(spans, causes)
    backwards: list[Segment] = []
    current: int | None = last
    time_ns = spans[last].end_ns
    while current is not None and time_ns > first_ns:
        pieces, cause = walk.step(current, time_ns)
        for piece in pieces:
            backwards.append(piece)
            time_ns = piece.start_ns
        if cause is not None and spans[cause].end_ns < time_ns:
            backwards.append(Segment(spans[cause].end_ns, time_ns, "idle"))
            time_ns = spans[cause].end_ns
        current = cause
    if time_ns > first_ns:
        backwards.append(Segment(first_ns, time_ns, "idle"))
    return CriticalPath(tuple(_join_idle(reversed(backwards))))


def likely_causes(spans: Spans, causes: Causes) -> Causes:
    """For each span the one that the path would go on with: known, or by the times.

    Returns:
        Indices in `spans`, None where a span starts everything.
    """
    if causes:
        return causes
    walk = _Walk(spans, causes)
    return tuple(walk.cause_alone(i) for i in range(len(spans)))


class _Walk:
    """One walk: what a span contributes, and which span it goes on with."""

    def __init__(self, spans: Spans, causes: Causes) -> None:
        self._spans = spans
        self._causes = causes
        self._before = _Before(spans)
        self._seen: set[int] = set()  # causes of a damaged trace could go in a circle

    def step(self, index: int, time_ns: int) -> tuple[list[Segment], int | None]:
        """The segments of one span that end at `time_ns`, last first, and its cause."""
        span = self._spans[index]
        if span.kind == "communication":
            return self._collective(index, time_ns)
        if is_wait(span):
            return [], self._waited_for(index)
        piece = _piece(span.start_ns, time_ns, _SHARE_OF[span.kind], index)
        return piece, self._cause(index)

    def cause_alone(self, index: int) -> int | None:
        """The cause of one span, whatever was visited before."""
        self._seen.clear()
        return self.step(index, self._spans[index].end_ns)[1]

    def _collective(self, index: int, time_ns: int) -> tuple[list[Segment], int | None]:
        """Wire, latency; then on with the rank that arrived last."""
        span = self._spans[index]
        last_to_arrive = index
        if "ready_ns" in span.attributes:
            ready_ns = min(max(span.start_ns, span.attributes["ready_ns"]), span.end_ns)
        else:
            last_to_arrive = self._before.last_peer(index)
            ready_ns = min(self._spans[last_to_arrive].start_ns, span.end_ns)
        wire_ns = min(ready_ns + span.attributes.get("latency_ns", 0), span.end_ns)
        pieces = _piece(wire_ns, time_ns, "wire", index)
        pieces += _piece(ready_ns, min(wire_ns, time_ns), "latency", index)
        cause = self._known_cause(index)
        if cause is None:
            cause = self._before.latest(last_to_arrive, ready_ns)
        return pieces, self._once(cause)

    def _waited_for(self, index: int) -> int | None:
        """What a CPU wait waited for; what the CPU did before if that was over."""
        span, cause = self._spans[index], self._known_cause(index)
        if cause is None:
            return self._once(self._before.latest(index, span.end_ns))
        if self._spans[cause].end_ns <= span.start_ns:
            cause = self._before.latest(index, span.start_ns)
        return self._once(cause)

    def _cause(self, index: int) -> int | None:
        cause = self._known_cause(index)
        if cause is None:
            cause = self._before.latest(index, self._spans[index].start_ns)
        return self._once(cause)

    def _known_cause(self, index: int) -> int | None:
        return self._causes[index] if self._causes else None

    def _once(self, cause: int | None) -> int | None:
        """No span twice."""
        if cause is None or cause in self._seen:
            return None
        self._seen.add(cause)
        return cause


class _Before:
    """Finds what ended last before a moment, where no cause is known."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._ends: dict[tuple[int, str | None], list[tuple[int, int, int]]] = {}
        for index, span in enumerate(spans):
            key = (span.end_ns, span.start_ns, index)
            self._ends.setdefault((span.rank, span.lane), []).append(key)
            self._ends.setdefault((span.rank, None), []).append(key)
        for ends in self._ends.values():
            ends.sort()
        sent = [i for i, span in enumerate(spans) if span.kind == "communication"]
        met = find_meetings(spans, sent, lambda i: (spans[i].lane, spans[i].name))
        self._peers = {i: together for together in met for i in together}

    def latest(self, index: int, time_ns: int) -> int | None:
        """The span of this rank that ended last, at `time_ns` or before.

        Among equals one on the same lane comes first: a kernel that follows another
        without a gap waited for it. The order (end, start, index) only descends, so
        that marks of no length cannot send the walk in a circle.
        """
        span = self._spans[index]
        on_lane = self._latest_of((span.rank, span.lane), index, time_ns)
        anywhere = self._latest_of((span.rank, None), index, time_ns)
        if on_lane is None or anywhere is None:
            return anywhere
        same_end = self._spans[on_lane].end_ns == self._spans[anywhere].end_ns
        return on_lane if same_end else anywhere

    def last_peer(self, index: int) -> int:
        """The same collective on the rank that started it last; itself where its peers
        are not known."""
        end_ns, peers = self._spans[index].end_ns, self._peers.get(index, ())
        overlapping = [p for p in peers if self._spans[p].start_ns < end_ns]
        return max(overlapping, key=lambda p: self._spans[p].start_ns, default=index)

    def _latest_of(
        self, where: tuple[int, str | None], index: int, time_ns: int
    ) -> int | None:
        ends, span = self._ends[where], self._spans[index]
        own = (span.end_ns, span.start_ns, index)
        bound = min(own, (time_ns, time_ns, len(self._spans)))
        position = bisect_right(ends, bound) - 1
        if position >= 0 and ends[position][2] == index:
            position -= 1
        return ends[position][2] if position >= 0 else None


def is_wait(span: Span) -> bool:
    """Whether this is the CPU waiting for the device, not computing."""
    return span.kind == "host" and span.lane == CPU_LANE and span.name[:4] == "wait"


def _piece(start_ns: int, end_ns: int, share: Share, span: int) -> list[Segment]:
    return [Segment(start_ns, end_ns, share, span)] if start_ns < end_ns else []


def _join_idle(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Idle stretches that follow one another become one."""
    for is_idle, run in groupby(segments, lambda segment: segment.share == "idle"):
        if is_idle:
            idle = list(run)
            yield Segment(idle[0].start_ns, idle[-1].end_ns, "idle")
        else:
            yield from run
