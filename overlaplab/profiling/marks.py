"""From times on streams to spans: the arithmetic of the event mode.

All that is known is when a stream passed certain points. Between two of them it is
taken to compute, unless it waited for another stream; gaps in which the device had
nothing to do because the CPU was late are not seen. A collective is known by when its
inputs were ready and when it had ended. Knows no torch and no clock.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlaplab.timeline import Span
from overlaplab.timeline.intervals import merge, subtract


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one range covered on the stream on which it was opened."""

    lane: str  # the stream
    label: str  # the range's name; "" for a step
    start_ns: int  # when the stream passed its two ends
    end_ns: int
    step: int | None = None  # which step, None outside of all


@dataclass(frozen=True, slots=True)
class Hold:
    """A stream waited for another one: from its last operator to the awaited end."""

    lane: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, in the order of launches on its communicator."""

    lane: str  # "comm", or "comm:NAME"
    operation: str  # "all_reduce", ...
    ready_ns: int  # when the stream of the launch had come to it: its inputs are there
    end_ns: int  # when it had ended
    bytes: int = 0  # the larger of inputs and outputs
    label: str = ""  # innermost range around its launch
    step: int | None = None  # as in `Stretch`


def spans_of(
    rank: int,
    stretches: Sequence[Stretch],
    holds: Sequence[Hold],
    messages: Sequence[Message],
) -> list[Span]:
    """The spans of one rank.

    A stream's stretches, less its holds, are compute spans, cut where the innermost
    label changes and named by it ("step" without one). A collective starts when its
    inputs are ready and the communicator's previous one has ended: its kernel cannot
    have started earlier, and may have started later. So the time of a collective is
    an upper bound.

    >>> step = Stretch("default", "", 0, 100, step=3)
    >>> sent = Message("comm", "all_reduce", 60, 90, step=3)
    >>> for s in spans_of(0, [step], [Hold("default", 80, 90)], [sent]):
    ...     print(s.lane, s.name, s.start_ns, s.end_ns)
    default step 0 80
    default step 90 100
    comm all_reduce 60 90
    """
    return [*_compute(rank, stretches, holds), *_communication(rank, messages)]


def _compute(
    rank: int, stretches: Sequence[Stretch], holds: Sequence[Hold]
) -> list[Span]:
    by_lane: dict[str, list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        by_lane[stretch.lane].append(stretch)
    spans = []
    for lane, of_lane in by_lane.items():
        held = merge((h.start_ns, h.end_ns) for h in holds if h.lane == lane)
        for start_ns, end_ns, stretch in _innermost(of_lane):
            about, name = _attributes(stretch), stretch.label or "step"
            spans += [
                Span(rank, lane, "compute", name, *interval, attributes=about)
                for interval in subtract([(start_ns, end_ns)], held)
            ]
    return spans


def _innermost(stretches: Sequence[Stretch]) -> list[tuple[int, int, Stretch]]:
    """Cut the union of `stretches` so that each interval is the innermost one's."""
    ordered = sorted(stretches, key=lambda s: (s.start_ns, -s.end_ns))
    cuts = sorted({t for s in ordered for t in (s.start_ns, s.end_ns)})
    intervals: list[tuple[int, int, Stretch]] = []
    open_: list[Stretch] = []
    coming = 0
    for start_ns, end_ns in itertools.pairwise(cuts):
        while coming < len(ordered) and ordered[coming].start_ns <= start_ns:
            open_.append(ordered[coming])
            coming += 1
        open_ = [s for s in open_ if s.end_ns > start_ns]
        if not open_:
            continue
        inner = open_[-1]
        if intervals and intervals[-1][1] == start_ns and intervals[-1][2] is inner:
            intervals[-1] = (intervals[-1][0], end_ns, inner)
        else:
            intervals.append((start_ns, end_ns, inner))
    return intervals


def _communication(rank: int, messages: Sequence[Message]) -> list[Span]:
    free_ns: dict[str, int] = {}
    spans = []
    for m in messages:
        end_ns = max(m.end_ns, m.ready_ns)  # events are exact to half a microsecond
        start_ns = min(max(m.ready_ns, free_ns.get(m.lane, m.ready_ns)), end_ns)
        free_ns[m.lane] = max(free_ns.get(m.lane, end_ns), end_ns)
        times, about = (start_ns, end_ns, m.bytes, 0), _attributes(m)
        spans.append(Span(rank, m.lane, "communication", m.operation, *times, about))
    return spans


def _attributes(of: Stretch | Message) -> dict[str, Any]:
    known = {"label": of.label or None, "step": of.step}
    return {name: value for name, value in known.items() if value is not None}
