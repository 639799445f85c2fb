"""Each collective: its peers, what it waited for, what of it is exposed, how fast.

Peers of a measured run are found by their order on a communicator; a virtual run names
them by its "ready_ns". Knows no findings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations
from statistics import median
from typing import Literal

from overlaplab.diagnosis.account import Entry
from overlaplab.diagnosis.lookup import Lookup
from overlaplab.diagnosis.steps import PROMPT_NS, Step
from overlaplab.hardware import Hardware
from overlaplab.hardware.collectives import OPERATIONS, collective_ns, crossing_bytes
from overlaplab.timeline import Span
from overlaplab.timeline.intervals import merge, total
from overlaplab.timeline.meetings import find_meetings

QUEUED_NS = 3_000  # between two collectives of one communicator
WaitedFor = Literal["its launch", "its inputs", "the previous collective", "nothing"]
_OF_KIND: Mapping[str, WaitedFor] = {
    "launch": "its launch",
    "communication": "the previous collective",
}


def is_set_up(span: Span) -> bool:
    """Whether a reducer, or `Zero3`, gave its parameters to the other ranks by it."""
    return span.attributes.get("label") == "broadcast parameters"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on one rank."""

    index: int  # of its span in `timeline.spans`
    span: Span
    step: Step  # whose it is
    group_size: int | None  # ranks that take part, None where nobody says
    last: int | None  # rank that arrived last, None where it is not known
    ready_ns: int  # when the last rank had arrived; its start where that is not known
    knows_ready: bool  # whether `ready_ns` is more than a guess
    waited_for: WaitedFor  # what let it start on this rank
    waited_span: int | None  # index of what it waited for, where it is a span
    exposed: Mapping[Entry, int]  # by entry of the account
    remaining_ns: int  # computation of its step after it started: what could hide it
    # computation of its step that was launched after it, whenever it ran; None where
    # launches are not known
    later_ns: int | None
    # what it takes alone: the span's own "alone_ns", or what the hardware profile says;
    # None without either
    alone_ns: int | None

    @property
    def exposed_ns(self) -> int:
        """Without computation beside it."""
        return sum(self.exposed.values())

    @property
    def waiting_ns(self) -> int:
        """In which it spun until its last peer came."""
        return self.ready_ns - self.span.start_ns

    @property
    def moving_ns(self) -> int:
        """From the last arrival to the end: latency and wire."""
        return self.span.end_ns - self.ready_ns

    @property
    def algorithm_bytes_per_s(self) -> int | None:
        """Payload by time: what nccl-tests call algbw. None: no bytes or no time."""
        if not self.span.bytes or self.moving_ns <= 0:
            return None
        return self.span.bytes * 1_000_000_000 // self.moving_ns

    @property
    def bus_bytes_per_s(self) -> int | None:
        """What crossed one rank's link, by time: busbw; comparable with the link's."""
        known = self.span.name in OPERATIONS and (self.group_size or 0) > 1
        if not known or not self.span.bytes or self.moving_ns <= 0:
            return None
        assert self.group_size is not None
        crossed = crossing_bytes(self.span.name, self.group_size, self.span.bytes)
        return crossed * 1_000_000_000 // self.moving_ns


def collectives_of(
    lookup: Lookup, steps: Sequence[Step], hardware: Hardware | None
) -> tuple[Collective, ...]:
    """Every collective of every step, by start."""
    peers = _peers(lookup, steps)
    exposed = _exposed(steps)
    skew = _clock_skew(lookup, peers)
    found = []
    for step in steps:
        facts = _LaunchOrder(lookup, step)
        previous: dict[str, int] = {}
        for index in step.communication:
            span = lookup.spans[index]
            together = peers.get(index, (index,))
            last, ready_ns, known = _arrival(lookup, index, together, skew)
            reason, what = _waited_for(lookup, step, index, previous.get(span.lane))
            size = _group_size(span, together)
            found.append(
                Collective(
                    index=index,
                    span=span,
                    step=step,
                    group_size=size,
                    last=last,
                    ready_ns=ready_ns,
                    knows_ready=known,
                    waited_for=reason,
                    waited_span=what,
                    exposed=exposed.get(index, {}),
                    remaining_ns=facts.remaining_ns(span.start_ns),
                    later_ns=facts.later_ns(index),
                    alone_ns=_alone_ns(span, size, hardware),
                )
            )
            previous[span.lane] = index
    return tuple(sorted(found, key=lambda c: (c.span.start_ns, c.span.rank)))


def total_moving_ns(collectives: Sequence[Collective]) -> int:
    """Union of [ready, end): the time in which bytes of one rank could move."""
    return total(merge((c.ready_ns, c.span.end_ns) for c in collectives))


class _LaunchOrder:
    """What a step computes after a moment, and after a launch."""

    def __init__(self, lookup: Lookup, step: Step) -> None:
        self._lookup = lookup
        spans = lookup.spans
        hiding = [i for i in step.compute if spans[i].start_ns < step.backward_end_ns]
        self._union = merge((spans[i].start_ns, spans[i].end_ns) for i in hiding)
        self._ends = [end for _, end in self._union]
        self._from_end = [0]  # lengths of the last 0, 1, 2, ... intervals
        for start, end in reversed(self._union):
            self._from_end.append(self._from_end[-1] + end - start)
        launched = [
            (launch[0], spans[i].duration_ns)
            for i in hiding
            if (launch := lookup.launch(i))
        ]
        launched.sort()
        self._launches = [launch_ns for launch_ns, _ in launched]
        self._up_to = [0, *accumulate(duration for _, duration in launched)]

    def remaining_ns(self, from_ns: int) -> int:
        first = bisect_right(self._ends, from_ns)
        whole = self._from_end[len(self._union) - first]
        if first < len(self._union):
            whole -= max(0, from_ns - self._union[first][0])
        return whole

    def later_ns(self, index: int) -> int | None:
        launch = self._lookup.launch(index)
        if launch is None or not self._launches:
            return None
        return self._up_to[-1] - self._up_to[bisect_right(self._launches, launch[0])]


def _peers(lookup: Lookup, steps: Sequence[Step]) -> dict[int, tuple[int, ...]]:
    """For each collective the spans of all ranks that are the same one."""
    number_of = {i: step.step for step in steps for i in step.communication}
    virtual = lookup.timeline.origin == "virtual"

    def key(index: int) -> tuple[object, ...]:
        span = lookup.spans[index]
        members = span.attributes.get("group_ranks")
        # A virtual run says who met; in a measured one the order on a lane does.
        ready = span.attributes.get("ready_ns") if virtual else None
        who = tuple(members) if isinstance(members, list | tuple) else None
        return number_of[index] if ready is None else None, span.lane, who, ready

    met = find_meetings(lookup.spans, number_of, key)
    return {i: together for together in met for i in together}


def _clock_skew(
    lookup: Lookup, peers: Mapping[int, tuple[int, ...]]
) -> dict[tuple[int, int], int]:
    """Median difference of two ranks' ends of the same collectives: their clocks'.

    Ranks leave a collective together; what their ends differ by in the median, their
    clocks do. Virtual ranks have one clock, and the median is 0.
    """
    differences: dict[tuple[int, int], list[int]] = defaultdict(list)
    for together in set(peers.values()):
        for one, other in permutations([lookup.spans[i] for i in together], 2):
            differences[one.rank, other.rank].append(other.end_ns - one.end_ns)
    return {pair: round(median(found)) for pair, found in differences.items()}


def _arrival(
    lookup: Lookup,
    index: int,
    together: Sequence[int],
    skew: Mapping[tuple[int, int], int],
) -> tuple[int | None, int, bool]:
    """Who arrived last, when on this rank's clock, and whether that is known."""
    span = lookup.spans[index]
    others = [lookup.spans[i] for i in together]
    last_ns, last = max(
        (o.start_ns - skew.get((span.rank, o.rank), 0), o.rank) for o in others
    )
    alone = len(together) < 2
    ready_ns = span.attributes.get("ready_ns")
    if ready_ns is None and alone:
        return None, span.start_ns, False
    if ready_ns is None or not (alone or lookup.timeline.origin == "virtual"):
        ready_ns = last_ns
    own_ns = min(max(span.start_ns, ready_ns), span.end_ns)
    return None if alone else last, own_ns, True


def _waited_for(
    lookup: Lookup, step: Step, index: int, previous: int | None
) -> tuple[WaitedFor, int | None]:
    """What this rank's part of the collective started right after.

    A virtual run knows the cause. In a measured one the latest of these counts: the
    end of its launch, the end of the collective before it on its communicator, the end
    of the last kernel before it.
    """
    timeline, span = lookup.timeline, lookup.spans[index]
    cause = timeline.causes[index] if timeline.causes else None
    if cause is not None and timeline.spans[cause].rank == span.rank:
        return _OF_KIND.get(timeline.spans[cause].kind, "its inputs"), cause
    launch = lookup.launch(index)
    if launch is not None and span.start_ns - launch[1] <= PROMPT_NS:
        return "its launch", None
    computed = lookup.writer(index)
    computed_ns = -1 if computed is None else lookup.spans[computed].end_ns
    if previous is not None:
        behind_ns = span.start_ns - lookup.spans[previous].end_ns
        # Kernels follow one another closely: one of them always ended just before.
        is_last = lookup.spans[previous].end_ns >= computed_ns
        if 0 <= behind_ns <= (PROMPT_NS if is_last else QUEUED_NS):
            return "the previous collective", previous
    if computed_ns < step.start_ns:
        return "nothing", None
    return "its inputs", computed


def _exposed(steps: Sequence[Step]) -> dict[int, dict[Entry, int]]:
    found: dict[int, dict[Entry, int]] = defaultdict(dict)
    for step in steps:
        own = set(step.communication)
        for stretch in step.stretches:
            if stretch.entry.startswith("sending") and stretch.span in own:
                assert stretch.span is not None
                of = found[stretch.span]
                of[stretch.entry] = of.get(stretch.entry, 0) + stretch.duration_ns
    return found


def _group_size(span: Span, together: Sequence[int]) -> int | None:
    stated = span.attributes.get("group_size")
    if isinstance(stated, int) and stated > 0:
        return stated
    return len(together) if len(together) > 1 else None


def _alone_ns(span: Span, size: int | None, hw: Hardware | None) -> int | None:
    stated = span.attributes.get("alone_ns")
    if stated is not None:
        return int(stated)
    if hw is None or size is None or not span.bytes or span.name not in OPERATIONS:
        return None
    return sum(collective_ns(hw, span.name, size, span.bytes))
