"""A timeline as compact columns, for the script that draws it in a browser.

Times are nanoseconds since the timeline's first start, as whole numbers: a float64
holds those exactly for the first hundred days. Each column takes the narrowest type
that holds its values. What needs arithmetic over spans (what is hidden, what caused
what) is worked out here once, so that the script only draws and looks up.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from overlaplab.timeline import KINDS, SHARES, Memory, Span, Timeline
from overlaplab.timeline.critical_path import likely_causes
from overlaplab.timeline.intervals import Interval, subtract
from overlaplab.timeline.report import union
from overlaplab.view.colors import COLORS, SHARE_COLORS, colors_of
from overlaplab.view.memory_row import summary
from overlaplab.view.panel import numbers
from overlaplab.view.units import shortened

MAX_SPANS = 100_000
_COLOR_NUMBER = {name: number for number, name in enumerate(COLORS)}
_WIDTHS = (("u1", 2**8), ("u2", 2**16), ("u4", 2**32), ("f8", 2**53))

Column = dict[str, Any]  # {"type": of _WIDTHS or "zero", "data": little-endian bytes}


def colors() -> dict[str, Any]:
    """What each kind of time looks like: for lanes, and for shares of a path."""
    return {
        "lanes": [{"name": name, **asdict(color)} for name, color in COLORS.items()],
        "shares": [
            {"name": name, **asdict(color)} for name, color in SHARE_COLORS.items()
        ],
    }


def payload(
    timeline: Timeline,
    *,
    title: str = "",
    max_spans: int = MAX_SPANS,
) -> dict[str, Any]:
    """One timeline for the script: numbers, text and columns.

    Args:
        title: over it.
        max_spans: of a longer timeline only the longest spans are sent, and a remark
            says so.

    Returns:
        JSON values, but for the bytes of its columns; see `to_json`.
    """
    report = timeline.report()
    start_ns = timeline.start_ns
    sent, remarks = _chosen(timeline, max_spans)
    spans = [timeline.spans[index] for index in sent]
    lane_numbers = {
        key: number
        for number, key in enumerate(
            (rank, lane)
            for rank in sorted({span.rank for span in spans})
            for lane in timeline.lanes(rank)
        )
    }
    strings: dict[str, int] = {"": 0}
    if timeline.represents > 1:
        remarks.append(f"1 rank stands for {timeline.represents}")
    return {
        "title": title,
        "numbers": numbers(timeline, report),
        "remarks": remarks,
        "step_ns": report.step_ns,
        "length_ns": timeline.end_ns - start_ns,
        "num_spans": len(timeline.spans),
        "lanes": [
            [rank, lane if len(lane) <= 60 else shortened(lane, 60)]
            for rank, lane in lane_numbers
        ],
        "ranks": [
            {
                "rank": each.rank,
                "start_ns": each.start_ns - start_ns,
                "end_ns": each.end_ns - start_ns,
                "numbers": numbers(timeline, each),
            }
            for each in report.ranks
            if any(rank == each.rank for rank, _ in lane_numbers)
        ],
        "kinds": list(KINDS),
        "spans": _spans(timeline, sent, lane_numbers, strings),
        "exposed": _exposed(timeline, lane_numbers),
        "path": _path(timeline, sent),
        "memory": [_memory(memory, start_ns) for memory in timeline.memory],
        "strings": list(strings),
    }


def to_json(content: Any) -> Any:
    """The same with bytes as base64 text, for a file; a widget sends them as they are.

    >>> to_json({"type": "u1", "data": b"hi"})
    {'type': 'u1', 'data': 'aGk='}
    """
    if isinstance(content, bytes):
        return base64.b64encode(content).decode("ascii")
    if isinstance(content, dict):
        return {key: to_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [to_json(value) for value in content]
    return content


def column(values: Iterable[int]) -> Column:
    """Whole numbers from 0 on, in the narrowest type that holds them all.

    >>> column([1, 300])
    {'type': 'u2', 'data': b'\\x01\\x00,\\x01'}
    >>> column([0, 0])
    {'type': 'zero', 'data': b''}
    """
    array = np.fromiter(values, dtype=np.int64)
    most = int(array.max(initial=0))
    if most == 0:
        return {"type": "zero", "data": b""}
    width = next(name for name, above in _WIDTHS if most < above)
    return {"type": width, "data": array.astype(f"<{width}").tobytes()}


def _chosen(timeline: Timeline, max_spans: int) -> tuple[list[int], list[str]]:
    """Indices of the spans to send, ascending, and what to say of the others."""
    wanted = list(range(len(timeline.spans)))
    if len(wanted) <= max_spans:
        return wanted, []
    wanted.sort(key=lambda index: -timeline.spans[index].duration_ns)
    remark = (
        f"only the {max_spans:,} longest of {len(wanted):,} spans are drawn; the "
        "numbers and the critical path count all"
    )
    return sorted(wanted[:max_spans]), [remark]


def _spans(
    timeline: Timeline,
    sent: Sequence[int],
    lane_numbers: dict[tuple[int, str], int],
    strings: dict[str, int],
) -> dict[str, Any]:
    def text(value: Any) -> int:
        return strings.setdefault("" if value is None else str(value), len(strings))

    spans = [timeline.spans[index] for index in sent]
    parts = [colors_of(span) for span in spans]
    lasting = [
        {color: end_ns - start_ns for color, start_ns, end_ns in part} for part in parts
    ]
    place = {index: number for number, index in enumerate(sent)}
    causes = likely_causes(timeline.spans, timeline.causes)
    cause = [place.get(causes[index], -1) for index in sent]  # type: ignore[arg-type]
    attributes = [span.attributes for span in spans]
    columns: dict[str, Iterable[int]] = {
        "index": sent,
        "lane": (lane_numbers[span.rank, span.lane] for span in spans),
        "kind": (KINDS.index(span.kind) for span in spans),
        # Of a collective the last part, which never has no length unless all have.
        "color": (
            _COLOR_NUMBER[part[-1][0]] if part else _COLOR_NUMBER["wire"]
            for part in parts
        ),
        "name": (text(span.name) for span in spans),
        "label": (text(each.get("label")) for each in attributes),
        "step": (text(each.get("step")) for each in attributes),
        "start": (span.start_ns - timeline.start_ns for span in spans),
        "length": (span.duration_ns for span in spans),
        "waiting": (each.get("waiting", 0) for each in lasting),
        "latency": (each.get("latency", 0) for each in lasting),
        "alone": (int(each.get("alone_ns") or 0) for each in attributes),
        "hidden": _hidden(timeline, spans),
        "bytes": (int(span.bytes) for span in spans),
        "flops": (int(span.flops) for span in spans),
        "cause": (number + 1 for number in cause),  # 0: none, or not known
    }
    return {
        "count": len(spans),
        **{name: column(values) for name, values in columns.items()},
    }


def _hidden(timeline: Timeline, spans: Sequence[Span]) -> list[int]:
    """Of each collective the time with computation of its rank beside it."""
    hidden = np.zeros(len(spans), dtype=np.int64)
    for rank, computing in _computing(timeline).items():
        sent = [
            place
            for place, span in enumerate(spans)
            if span.kind == "communication" and span.rank == rank
        ]
        if not sent or not computing:
            continue
        # Time computed until each border: it grows between start and end, evenly.
        borders = np.array(computing, dtype=np.int64).ravel() - timeline.start_ns
        growth = np.diff(borders, prepend=borders[0]) * (np.arange(len(borders)) % 2)
        windows = np.array([(spans[i].start_ns, spans[i].end_ns) for i in sent])
        until = np.interp(windows - timeline.start_ns, borders, growth.cumsum())
        hidden[sent] = until[:, 1] - until[:, 0]
    return hidden.tolist()


def _computing(timeline: Timeline) -> dict[int, list[Interval]]:
    by_rank: dict[int, list[Span]] = {}
    for span in timeline.spans:
        by_rank.setdefault(span.rank, []).append(span)
    return {rank: union(spans, "compute") for rank, spans in by_rank.items()}


def _exposed(
    timeline: Timeline, lane_numbers: dict[tuple[int, str], int]
) -> dict[str, Any]:
    """When a lane sends and its rank computes nothing, as `Panel` outlines it."""
    computing = _computing(timeline)
    by_lane: dict[tuple[int, str], list[Span]] = {key: [] for key in lane_numbers}
    for span in timeline.spans:
        by_lane.get((span.rank, span.lane), []).append(span)
    found = [
        (number, *interval)
        for key, number in lane_numbers.items()
        for interval in subtract(
            union(by_lane[key], "communication"), computing[key[0]]
        )
    ]
    return {
        "count": len(found),
        "lane": column(number for number, _, _ in found),
        "start": column(start_ns - timeline.start_ns for _, start_ns, _ in found),
        "length": column(end_ns - start_ns for _, start_ns, end_ns in found),
    }


def _path(timeline: Timeline, sent: Sequence[int]) -> dict[str, Any]:
    """The critical path; a segment of a span that is not sent is on no lane."""
    place = {index: number for number, index in enumerate(sent)}
    segments = timeline.critical_path().segments
    on = [-1 if s.span is None else place.get(s.span, -1) for s in segments]
    return {
        "count": len(segments),
        "start": column(s.start_ns - timeline.start_ns for s in segments),
        "length": column(s.end_ns - s.start_ns for s in segments),
        "share": column(SHARES.index(s.share) for s in segments),
        "span": column(number + 1 for number in on),
    }


def _memory(memory: Memory, start_ns: int) -> dict[str, Any]:
    times_ns = [max(time_ns - start_ns, 0) for time_ns, _ in memory.steps]
    return {
        "rank": memory.rank,
        "count": len(memory.steps),
        "time": column(times_ns),
        "size": column(size for _, size in memory.steps),
        "kinds": [[kind, column(sizes)] for kind, sizes in memory.kinds],
        "peak_bytes": memory.peak_bytes,
        "peak_ns": max(memory.peak_ns - start_ns, 0),
        "summary": summary(memory),
    }
