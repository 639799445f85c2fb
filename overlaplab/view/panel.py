"""One timeline in one pair of axes: lanes, bars, outlines, the critical path, names.

Solid is computing, hatched is communication; a strip along the top of a message marks
when it is exposed, a line under the bars the critical path, a pale band its rank's
step, dotted lines where another step begins. Knows spans and causes only.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import intersect, subtract
from overlaplab.timeline.report import Report, union
from overlaplab.view.colors import (
    BAND,
    COLORS,
    EXPOSED,
    INK,
    LABEL,
    PATH,
    TEXT,
    colors_of,
)
from overlaplab.view.downsampling import Rectangle, rectangles
from overlaplab.view.memory_row import ROWS as MEMORY_ROWS
from overlaplab.view.memory_row import draw_memory
from overlaplab.view.stacking import ROW_IN, TITLE_LINE_IN, Part, write_above
from overlaplab.view.units import format_ns, share_text, shortened, time_unit

Box = tuple[float, float, float, float]  # left, right, top, bottom, in data units

MAX_RANKS = 8  # more in one figure nobody can read
_LONG_TITLE = 56  # characters
_GROUP_GAP = 0.45  # rows between ranks
_BAR = (0.10, 0.78)  # top and bottom of a bar within its row
_PATH_AT = 0.89
_STRIP = 0.2  # of a row: what marks exposed time, along the top of a bar
_CHAR_PX = 5.9  # a character of the 7.5-point font at DPI, on the wide side
_MAX_NAMES = 80


class Panel:
    """One timeline in one pair of axes."""

    def __init__(
        self,
        timeline: Timeline,
        title: str,
        *,
        ranks: Collection[int] | None = None,
        window: tuple[int, int] | None = None,
        critical_path: bool = True,
        memory: bool = False,
        memory_top_bytes: int = 0,
    ) -> None:
        self.timeline = timeline
        self.memories = {m.rank: m for m in timeline.memory} if memory else {}
        peaks = (m.peak_bytes for m in self.memories.values())
        self.memory_top_bytes = max(memory_top_bytes, *peaks, 0)
        self.title = title
        self.start_ns, self.end_ns = window or (timeline.start_ns, timeline.end_ns)
        if self.end_ns < self.start_ns or (window and self.end_ns == self.start_ns):
            raise ValueError(f"window {window} ns is empty; expected (start, end)")
        self.end_ns = max(self.end_ns, self.start_ns + 1)
        self.critical_path = critical_path
        self.scale, self.unit = time_unit(self.end_ns - timeline.start_ns)
        self._place_rows(ranks)
        # A title that would run into the numbers gets lines of its own above them.
        self.title_lines = textwrap.wrap(self._heading(), 110) or [""]
        long = len(self.title_lines) > 1 or len(self.title_lines[0]) > _LONG_TITLE
        self.num_title_lines = len(self.title_lines) if long else 0

    def _place_rows(self, ranks: Collection[int] | None) -> None:
        self.rows: dict[tuple[int, str], float] = {}
        self.memory_rows: dict[int, float] = {}
        self.spans: dict[tuple[int, str], list[Span]] = {}
        self.by_rank: dict[int, list[Span]] = {}
        for span in self.timeline.spans:
            self.by_rank.setdefault(span.rank, []).append(span)
        present = sorted(self.by_rank)
        drawn = [r for r in present if ranks is None or r in ranks][:MAX_RANKS]
        self.num_drawn = len(drawn)
        y = 0.0
        for rank in drawn:
            y += _GROUP_GAP if self.rows else 0.0
            for lane in self.timeline.lanes(rank):
                self.rows[rank, lane] = y
                self.spans[rank, lane] = []
                y += 1
            for span in self.by_rank[rank]:
                self.spans[rank, span.lane].append(span)
            if rank in self.memories:
                self.memory_rows[rank] = y
                y += MEMORY_ROWS
        if not self.rows and self.timeline.spans:
            raise ValueError(
                f"nothing to draw of ranks {sorted(ranks or present)}; there are ranks "
                f"{present}"
            )
        self.num_rows = max(y, 1.0)

    def part(self) -> Part:
        labels = [label for _, label in self._labels()]
        return Part(
            ROW_IN * self.num_rows,
            labels,
            self.draw,
            alt=self.alt(),
            num_title_lines=self.num_title_lines,
        )

    def alt(self) -> str:
        """What the axes show, for those who do not see them."""
        heading = self._heading()
        lanes = [self._label(*key) for key in self.rows]
        said = f"{heading}: " if heading else ""
        said += f"timeline, {numbers(self.timeline, separator=', ')}"
        said += f"; lanes {', '.join(lanes)}" if lanes else ""
        shares_ns = self.timeline.critical_path().shares_ns
        if self.critical_path and any(shares_ns.values()):
            said += f"; critical path {share_text(shares_ns)}"
        return f"{said}."

    def _labels(self) -> list[tuple[float, str]]:
        """The middle of each row, and what it is called."""
        labels = [(y + 0.5, self._label(*key)) for key, y in self.rows.items()]
        for rank, y in self.memory_rows.items():
            labels.append((y + MEMORY_ROWS * 0.65, self._label(rank, "memory")))
        return labels

    def _label(self, rank: int, lane: str) -> str:
        one_rank = len({rank for rank, _ in self.rows}) == 1
        lane = shortened(lane)
        return lane if one_rank else f"rank {rank}  {lane}"

    def draw(self, ax: Axes) -> list[str]:
        """Fill the axes; returns what the legend must explain."""
        width_px = ax.get_position().width * ax.figure.bbox.width
        self.columns = max(50, int(width_px))
        self.ns_per_px = (self.end_ns - self.start_ns) / self.columns
        used = []
        self._frame(ax)
        self._bands(ax)
        used += self._bars(ax)
        used += self._exposed(ax)
        self._steps(ax)
        if self.critical_path:
            used += self._path(ax)
        self._names(ax)
        for rank, y in self.memory_rows.items():
            used += draw_memory(
                ax,
                self.memories[rank],
                y=y,
                top_bytes=self.memory_top_bytes,
                window=(self.start_ns, self.end_ns),
                x=self._x,
            )
        return used

    def _x(self, time_ns: float) -> float:
        """In the axis' unit, since the timeline's first start."""
        return (time_ns - self.timeline.start_ns) / self.scale

    def _box(self, start_ns: float, end_ns: float, y: float) -> Box:
        return self._x(start_ns), self._x(end_ns), y + _BAR[0], y + _BAR[1]

    def _frame(self, ax: Axes) -> None:
        ax.set_facecolor("none")
        ax.set_xlim(self._x(self.start_ns), self._x(self.end_ns))
        ax.set_ylim(self.num_rows, 0)
        labels = self._labels()
        ax.set_yticks([y for y, _ in labels])
        ax.set_yticklabels([label for _, label in labels])
        ax.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=INK)
        ax.tick_params(axis="x", labelsize=8.5, labelcolor=INK, color=INK)
        ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} {self.unit}"))
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color(INK)
        long = self.num_title_lines > 0
        near_pt = (
            11 if len(self.timeline.steps) > 1 else 7
        )  # names of steps are under it
        above_pt = near_pt + 72 * TITLE_LINE_IN if long else near_pt
        write_above(
            ax, "\n".join(self.title_lines), above_pt, size=9 if long else 10, bold=True
        )
        write_above(
            ax,
            numbers(self.timeline),
            near_pt,
            size=9,
            right=True,
        )

    def _heading(self) -> str:
        heading = self.title
        if self.timeline.represents > 1:
            heading += f"  (1 rank stands for {self.timeline.represents})"
        if self.num_drawn < len(self.by_rank):
            drawn = sorted({rank for rank, _ in self.rows})
            shown = f"rank {drawn[0]}" if len(drawn) == 1 else f"{len(drawn)} ranks"
            heading += f"  ({shown} of {len(self.by_rank)})"
        return heading.strip()

    def _bands(self, ax: Axes) -> None:
        """A pale band from a rank's first start to its last end."""
        bands = []
        for (rank, _), y in self.rows.items():
            spans = self.by_rank[rank]
            first, last = spans[0].start_ns, max(s.end_ns for s in spans)
            bands.append(self._box(first, last, y))
        _add_boxes(ax, bands, facecolor=BAND, edgecolor="none", zorder=1)

    def _bars(self, ax: Axes) -> list[str]:
        by_color: dict[str, list[tuple[Rectangle, float]]] = {}
        for key, y in self.rows.items():
            for rectangle in rectangles(
                self.spans[key], self.start_ns, self.end_ns, self.columns
            ):
                by_color.setdefault(rectangle.color, []).append((rectangle, y))
        for name, placed in by_color.items():
            color = COLORS[name]
            # Between bars of a few pixels an outline would look like idle time.
            for outlined in (False, True):
                boxes = [
                    self._box(rectangle.start_ns, rectangle.end_ns, y)
                    for rectangle, y in placed
                    if (rectangle.whole and self._is_wide(rectangle)) == outlined
                ]
                _add_boxes(
                    ax,
                    boxes,
                    facecolor=color.face,
                    edgecolor=color.edge,
                    linewidth=0.5 if outlined else 0.0,
                    # Smoothed edges of neighbours leave a pale line between them.
                    antialiased=outlined,
                    hatch=color.hatch or None,
                    zorder=2 if outlined else 1.9,
                )
        return list(by_color)

    def _is_wide(self, rectangle: Rectangle) -> bool:
        narrowest_px = 2 if COLORS[rectangle.color].hatch else 4
        return rectangle.end_ns - rectangle.start_ns >= narrowest_px * self.ns_per_px

    def _exposed(self, ax: Axes) -> list[str]:
        boxes = []
        for (rank, lane), y in self.rows.items():
            sending = union(self.spans[rank, lane], "communication")
            if not sending:
                continue
            exposed = subtract(sending, union(self.by_rank[rank], "compute"))
            for start_ns, end_ns in intersect(exposed, [(self.start_ns, self.end_ns)]):
                left, right, top, _ = self._box(start_ns, end_ns, y)
                boxes.append((left, right, top, top + _STRIP))
        below = [(a, b, low, low + _STRIP / 5) for a, b, _, low in boxes]
        _add_boxes(ax, below, facecolor=LABEL, linewidth=0, zorder=3)
        _add_boxes(ax, boxes, facecolor=EXPOSED, linewidth=0, zorder=3)
        return ["exposed"] if boxes else []

    def _steps(self, ax: Axes) -> None:
        """Where each step but the first begins, lane by lane: the CPU is ahead."""
        firsts: dict[int, dict[float, int]] = {}
        for key, y in self.rows.items():
            for span in self.spans[key]:
                step = span.attributes.get("step")
                if step is not None:
                    firsts.setdefault(step, {}).setdefault(y, span.start_ns)
        lines, named_px = [], -math.inf
        for step in sorted(firsts)[1:]:
            for y, start_ns in firsts[step].items():
                if self.start_ns <= start_ns <= self.end_ns:
                    lines.append([(self._x(start_ns), y), (self._x(start_ns), y + 1)])
            top_ns = firsts[step].get(min(firsts[step]), 0)
            at_px = (top_ns - self.start_ns) / self.ns_per_px
            if named_px + 40 <= at_px <= self.columns - 40 and at_px >= 0:
                named_px = at_px
                self._write_step(ax, step, top_ns)
        if lines:
            dots = {"linestyles": [(0, (1, 1))], "linewidths": 1}
            marks = LineCollection(lines, colors=INK, zorder=5, **dots)
            ax.add_collection(marks, autolim=False)

    def _write_step(self, ax: Axes, step: int, start_ns: int) -> None:
        ax.annotate(
            f"step {step}",
            (self._x(start_ns), 0),
            (0, 0.5),
            textcoords="offset points",
            fontsize=7,
            color=INK,
            va="bottom",
            annotation_clip=False,
        )

    def _path(self, ax: Axes) -> list[str]:
        """A line under the spans of the chain, and thin ones where it changes lane."""
        lines, jumps = [], []
        previous_y: float | None = None
        last_jump_px = (-1.0, 0.0)
        for y, start_ns, end_ns in self._path_runs():
            x, at = self._x(start_ns), y + _PATH_AT
            lines.append([(x, at), (self._x(end_ns), at)])
            if previous_y is not None and previous_y != at:
                jump_px = (start_ns // max(self.ns_per_px, 1), previous_y + at)
                if jump_px != last_jump_px:  # one line a column is all that shows
                    jumps.append([(x, previous_y), (x, at)])
                last_jump_px = jump_px
            previous_y = at
        ax.add_collection(
            LineCollection(
                lines, colors=PATH, linewidths=2.2, zorder=4, capstyle="butt"
            ),
            autolim=False,
        )
        ax.add_collection(
            LineCollection(jumps, colors=PATH, linewidths=0.7, zorder=4), autolim=False
        )
        return ["path"] if lines else []

    def _path_runs(self) -> Iterable[tuple[float, int, int]]:
        """(row, start_ns, end_ns) of the path, neighbours in one row joined."""
        run: tuple[float, int, int] | None = None
        for segment in self.timeline.critical_path().segments:
            if segment.span is None:
                continue
            span = self.timeline.spans[segment.span]
            y = self.rows.get((span.rank, span.lane))
            start = max(segment.start_ns, self.start_ns)
            end = min(segment.end_ns, self.end_ns)
            if y is None or start >= end:
                continue
            if run is not None and run[0] == y and start - run[2] <= 0:
                run = (y, run[1], end)
                continue
            if run is not None:
                yield run
            run = (y, start, end)
        if run is not None:
            yield run

    def _names(self, ax: Axes) -> None:
        """The widest spans get their names, where these fit."""
        candidates = []
        for y, spans in zip(self.rows.values(), self.spans.values(), strict=True):
            for span in spans:
                first = max(span.start_ns, self.start_ns)
                last = min(span.end_ns, self.end_ns)
                margin_px = 6 if span.kind == "communication" else 12
                half_ns = (_CHAR_PX * len(_name(span)) + margin_px) * self.ns_per_px / 2
                if last - first >= 2 * half_ns:
                    candidates.append((last - first, first, y, half_ns, span))
        candidates.sort(key=lambda c: -c[0])
        taken: dict[float, list[tuple[float, float]]] = {}
        for length_ns, first, y, half_ns, span in candidates[:_MAX_NAMES]:
            middle_ns = first + length_ns / 2
            left, right = middle_ns - half_ns, middle_ns + half_ns
            row = taken.setdefault(y, [])
            # Measured collectives may overlap on their lane: the longest is named.
            if all(right <= a or b <= left for a, b in row):
                row.append((left, right))
                self._write_name(ax, span, middle_ns, y)

    def _write_name(self, ax: Axes, span: Span, middle_ns: float, y: float) -> None:
        sends = span.kind == "communication"
        box = {"facecolor": f"{LABEL}D9", "edgecolor": "none", "pad": 0.7}
        ax.text(
            self._x(middle_ns),
            y + sum(_BAR) / 2 + 0.02,
            _name(span),
            fontsize=7.5,
            ha="center",
            va="center",
            color=TEXT if sends else COLORS[colors_of(span)[0][0]].text,
            bbox=box if sends else None,
            zorder=6,
            clip_on=True,
        )


def numbers(
    timeline: Timeline, report: Report | None = None, *, separator: str = 5 * " "
) -> str:
    """The three numbers of a step, in one line; one, where nothing is sent.

    Of a recording of several steps they are those of all together. What was saved
    stands there only if it is known.

    Args:
        report: of one of its ranks; else of the whole.
        separator: between the numbers.
    """
    report = timeline.report() if report is None else report
    num_steps = len(timeline.steps)
    what = "step" if num_steps <= 1 else f"{num_steps} steps"
    length = f"{what} {format_ns(report.step_ns)}"
    if not report.communication_ns:
        return length
    said = [length, f"exposed {format_ns(report.exposed_ns)}"]
    if knows_saved(timeline):
        said.append(f"saved {format_ns(report.saved_ns)}")
    return separator.join(said)


def knows_saved(timeline: Timeline) -> bool:
    """Whether its kernels took as long as they take alone, within 1 % of the step: only
    then does this run show what it saved. A measured one does not know."""
    slowed_ns = sum(
        max(0, s.end_ns - max(s.start_ns, s.attributes.get("ready_ns", 0)) - alone_ns)
        for s in timeline.spans
        if isinstance(alone_ns := s.attributes.get("alone_ns"), int)
    )
    return timeline.origin == "virtual" and 100 * slowed_ns <= timeline.step_ns


def _add_boxes(ax: Axes, boxes: Sequence[Box], **style: Any) -> None:
    """Add rectangles as one path: hatching many apart takes Agg half a second."""
    vertices, codes = [], []
    for left, right, top, bottom in boxes:
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        vertices += [*corners, corners[0]]
        codes += [Path.MOVETO, *3 * [Path.LINETO], Path.CLOSEPOLY]
    if boxes:
        # Not add_patch: the limits are set, and working them out takes longer.
        ax.add_artist(PathPatch(Path(vertices, codes), **style))


def _name(span: Span) -> str:
    label = span.attributes.get("label")
    return str(label) if span.kind == "communication" and label else span.name
