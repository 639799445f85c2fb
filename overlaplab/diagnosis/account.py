"""Where a step's time goes on one rank: an account that adds up to the nanosecond.

[Note: the account] Each moment of a step falls under exactly one entry, the first that
is true of it:

- computing: a compute kernel runs (communication beside it is hidden);
- sending: a collective runs and nothing computes. By what the computation that comes
  next waits for:
    - sending_last: none comes next in this step, or only what uses the result (an
      optimizer): nothing is left to hide behind;
    - sending_cpu: the next kernel was not launched yet;
    - sending_awaited: it was launched, and starts when the collective ends;
    - sending_other: it was launched, and starts before the collective ends;
- copying: a memcpy or memset runs, and nothing else;
- idle: nothing runs. By what the kernel that comes next waits for:
    - idle_cpu: it was not launched yet (the CPU was busy launching);
    - idle_host: it was not launched yet, because the CPU did something else: a span
      says so (loading a batch), or it launched nothing at all for `ELSEWHERE_NS`;
    - idle_sync: it was not launched yet, because the CPU had been waiting for the
      device (a synchronisation, a copy to the host);
    - idle_other: it was launched (the device's own delay of a few microseconds, or an
      event), its launch is not known, or nothing comes next.

*CPU-bound time* is idle_cpu + idle_host + idle_sync: the device is idle while the next
kernel was not launched yet. It needs the launches: `Span` attribute "launch_ns", or
launch spans with the "op" of the kernel; without them it is None, and the idle time is
idle_other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from overlaplab.diagnosis.lookup import COPIES, Lookup
from overlaplab.timeline.intervals import Interval, intersect, merge, subtract

Entry = Literal[
    "computing",
    "sending_last",
    "sending_cpu",
    "sending_awaited",
    "sending_other",
    "copying",
    "idle_cpu",
    "idle_host",
    "idle_sync",
    "idle_other",
]
ENTRIES: tuple[Entry, ...] = get_args(Entry)
ELSEWHERE_NS = 500_000  # Python launches something far more often


@dataclass(frozen=True, slots=True)
class Stretch:
    """One stretch of a step that falls under one entry."""

    start_ns: int
    end_ns: int
    entry: Entry
    # index of the span that the stretch belongs to: the collective of "sending", the
    # kernel that comes next of "idle"; None where there is none
    span: int | None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def account(
    lookup: Lookup, rank: int, window: Interval, epilogue_ns: int
) -> tuple[Stretch, ...]:
    """The stretches of one rank's step, in order of time. See [Note: the account]. The
    computation that starts at `epilogue_ns` or later only uses what was sent."""
    spans = {
        index: span
        for index in lookup.device(rank)
        if (span := lookup.spans[index]).start_ns < window[1]
        and span.end_ns > window[0]
    }

    def busy(*kinds: str) -> list[Interval]:
        of = merge((s.start_ns, s.end_ns) for s in spans.values() if s.kind in kinds)
        return intersect(of, [window])

    computing = busy("compute")
    sending = subtract(busy("communication"), computing)
    copying = subtract(busy(*COPIES), merge([*computing, *sending]))
    idle = subtract([window], merge([*computing, *sending, *copying]))
    stretches = [Stretch(*interval, "computing", None) for interval in computing]
    stretches += [Stretch(*interval, "copying", None) for interval in copying]
    collectives = [i for i, s in spans.items() if s.kind == "communication"]
    stretches += _sending(lookup, rank, sending, collectives, epilogue_ns)
    waits = [(w.start_ns, w.end_ns) for w in lookup.waits(rank)]
    works = merge((w.start_ns, w.end_ns) for w in lookup.works(rank))
    for interval in idle:
        stretches += _idle(lookup, rank, interval, waits, works)
    return tuple(sorted(stretches, key=lambda p: p.start_ns))


def sums(stretches: Sequence[Stretch]) -> dict[Entry, int]:
    """Nanoseconds of each entry; they add up to the step."""
    result: dict[Entry, int] = dict.fromkeys(ENTRIES, 0)
    for stretch in stretches:
        result[stretch.entry] += stretch.duration_ns
    return result


def _sending(
    lookup: Lookup,
    rank: int,
    intervals: Sequence[Interval],
    collectives: Sequence[int],
    epilogue_ns: int,
) -> Iterator[Stretch]:
    """Exposed communication, one stretch per collective and cause."""
    first = 0
    for interval in intervals:
        reached = interval[0]
        while first < len(collectives):
            if lookup.spans[collectives[first]].end_ns > reached:
                break
            first += 1
        for index in collectives[first:]:
            span = lookup.spans[index]
            if span.start_ns >= interval[1]:
                break
            start, end = max(reached, span.start_ns), min(interval[1], span.end_ns)
            if start < end:
                reached = end
                yield from _one_sending(lookup, rank, (start, end), index, epilogue_ns)


def _one_sending(
    lookup: Lookup, rank: int, interval: Interval, index: int, epilogue_ns: int
) -> Iterator[Stretch]:
    start, end = interval
    follower = lookup.next_compute(rank, end)
    if follower is None or lookup.spans[follower].start_ns >= epilogue_ns:
        yield Stretch(start, end, "sending_last", index)
        return
    launch = lookup.launch(follower)
    if launch is not None and start < launch[1]:
        late = min(end, launch[1])
        yield Stretch(start, late, "sending_cpu", index)
        start = late
    if start < end:
        own_end = lookup.spans[index].end_ns
        awaited = lookup.spans[follower].start_ns >= own_end
        yield Stretch(
            start, end, "sending_awaited" if awaited else "sending_other", index
        )


def _idle(
    lookup: Lookup,
    rank: int,
    interval: Interval,
    waits: Sequence[Interval],
    works: Sequence[Interval],
) -> Iterator[Stretch]:
    start, end = interval
    index = lookup.next_on_device(rank, end)
    launch = None if index is None else lookup.launch(index)
    if launch is not None and start < launch[1]:
        late = min(end, launch[1])
        # The CPU was still waiting when the device had nothing left to do.
        held = any(w[0] <= start <= w[1] and w[0] < launch[0] for w in waits)
        elsewhere = intersect([(start, late)], works)
        quiet_ns = lookup.quiet_since(rank, launch[0])
        if quiet_ns is not None and launch[0] - max(start, quiet_ns) >= ELSEWHERE_NS:
            elsewhere = merge([*elsewhere, (max(start, quiet_ns), launch[0])])
        for begin, stop in elsewhere:
            yield Stretch(begin, stop, "idle_host", index)
        for begin, stop in subtract([(start, late)], elsewhere):
            yield Stretch(begin, stop, "idle_sync" if held else "idle_cpu", index)
        start = late
    if start < end:
        yield Stretch(start, end, "idle_other", index)
