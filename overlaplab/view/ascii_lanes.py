"""A timeline as text: the twin of a figure, for terminals and screen readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from overlaplab.timeline import Memory, Share, Span, Timeline
from overlaplab.timeline.critical_path import is_wait
from overlaplab.timeline.intervals import Interval, intersect, merge, subtract
from overlaplab.timeline.report import union
from overlaplab.view.arguments import check_timeline
from overlaplab.view.memory_row import at, summary
from overlaplab.view.panel import MAX_RANKS, numbers
from overlaplab.view.units import format_ns, shortened

# Mark and legend, in the order in which marks win a column that several share equally.
_LEGEND: Mapping[str, tuple[str, str]] = {
    "exposed": ("!", "exposed communication"),
    "hidden": ("=", "hidden communication"),
    "compute": ("#", "compute"),
    "memcpy": ("m", "copy"),
    "memset": ("s", "memset"),
    "launch": ("l", "launch"),
    "host": ("h", "CPU computes"),
    "wait": ("w", "CPU waits"),
}
_MARKS = {kind: mark for kind, (mark, _) in _LEGEND.items()}
_SHARE_MARKS: Mapping[Share, str] = {
    "compute": "C",
    "wire": "W",
    "latency": "A",
    "launch": "L",
    "idle": "-",
}


def text(timeline: Timeline, *, width: int = 100, memory: bool = False) -> str:
    """Lanes as rows of letters: a column shows what takes most of its time.

    The last row is the critical path: C compute, W wire, A latency (alpha), L launch,
    - idle.

    Args:
        width: characters of a line, at least 40.
        memory: a row with the bytes that each rank holds, where they are known: from
            " " for none to "8" for the peak; and who holds most of it.
    """
    check_timeline(timeline)
    if width < 40:
        raise ValueError(f"width {width}: a timeline needs at least 40 characters")
    if not timeline.spans:
        return "an empty timeline"
    ranks = sorted({span.rank for span in timeline.spans})
    names = {
        (rank, lane): f"rank {rank} {shortened(lane, max(12, width // 3))}"
        for rank in ranks[:MAX_RANKS]
        for lane in timeline.lanes(rank)
    }
    memories = {f"rank {m.rank} memory": m for m in timeline.memory if memory}
    left = max(len(name) for name in [*names.values(), *memories, "critical path"])
    grid = _Grid(timeline.start_ns, timeline.end_ns, width - left - 3)
    lines = [numbers(timeline), grid.axis(left)]
    used: set[str] = set()
    for (rank, lane), name in names.items():
        layers = _layers([s for s in timeline.spans if s.rank == rank], lane)
        lines.append(f"{name:{left}} |{grid.row(layers, _MARKS)}|")
        used.update(kind for kind, intervals in layers.items() if intervals)
    for name, held in memories.items():
        lines.append(f"{name:{left}} |{grid.heights(held)}|")
    lines.append(
        f"{'critical path':{left}} |{grid.row(_path(timeline), _SHARE_MARKS)}|"
    )
    legend = [" ".join(words) for kind, words in _LEGEND.items() if kind in used]
    lines.append("   ".join(legend))
    lines.append("   ".join(f"{m} {share}" for share, m in _SHARE_MARKS.items()))
    lines += [f"{name}: {summary(held)}" for name, held in memories.items()]
    if len(ranks) > MAX_RANKS:
        lines.append(f"{len(ranks) - MAX_RANKS} more ranks not shown")
    return "\n".join(lines)


def _layers(spans: Sequence[Span], lane: str) -> dict[str, list[Interval]]:
    """What one lane of one rank does, by the names of _LEGEND."""
    own = [span for span in spans if span.lane == lane]
    layers = {
        kind: union(own, kind) for kind in ("compute", "memcpy", "memset", "launch")
    }
    sending, computing = union(own, "communication"), union(spans, "compute")
    layers["hidden"] = intersect(sending, computing)
    layers["exposed"] = subtract(sending, computing)
    waits = [s for s in own if is_wait(s)]
    layers["wait"] = union(waits, "host")
    layers["host"] = union([s for s in own if not is_wait(s)], "host")
    return layers


def _path(timeline: Timeline) -> dict[Share, list[Interval]]:
    layers: dict[Share, list[Interval]] = {share: [] for share in _SHARE_MARKS}
    for segment in timeline.critical_path().segments:
        layers[segment.share].append((segment.start_ns, segment.end_ns))
    return {share: merge(intervals) for share, intervals in layers.items()}


class _Grid:
    """Columns of equal time."""

    def __init__(self, start_ns: int, end_ns: int, columns: int) -> None:
        self.start_ns, self.columns = start_ns, columns
        self.length_ns = max(end_ns - start_ns, 1)

    def axis(self, left: int) -> str:
        end = format_ns(self.length_ns)
        return f"{'':{left}}  0{end:>{self.columns - 1}}"

    def row(
        self, layers: Mapping[Any, Sequence[Interval]], marks: Mapping[Any, str]
    ) -> str:
        """The mark of the layer that takes most of each column, " " for none."""
        best = [(0, " ")] * self.columns
        for name, mark in marks.items():
            for column, filled in self._filled(layers[name]).items():
                if filled > best[column][0]:
                    best[column] = (filled, mark)
        return "".join(mark for _, mark in best)

    def heights(self, memory: Memory) -> str:
        """The most that is held in each column, in eighths of the peak."""
        marks = []
        for column in range(self.columns):
            start_ns = self.start_ns + column * self.length_ns // self.columns
            end_ns = self.start_ns + (column + 1) * self.length_ns // self.columns
            within = (size for t, size in memory.steps if start_ns <= t < end_ns)
            most = max(at(memory, start_ns), *within, 0)
            marks.append(" 12345678"[-(-8 * most // max(memory.peak_bytes, 1))])
        return "".join(marks)

    def _filled(self, intervals: Sequence[Interval]) -> dict[int, int]:
        """Time by column, in units of 1 / columns of a nanosecond, to stay exact."""
        filled: dict[int, int] = {}
        for start_ns, end_ns in intervals:
            start = (start_ns - self.start_ns) * self.columns
            end = (end_ns - self.start_ns) * self.columns
            for column in range(start // self.length_ns, -(-end // self.length_ns)):
                left = column * self.length_ns
                part = min(end, left + self.length_ns) - max(start, left)
                filled[column] = filled.get(column, 0) + part
        return filled
