"""Critical-path shares as bars that add up to 100 %. Knows timelines only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overlaplab.timeline import Timeline
from overlaplab.view.colors import INK, LABEL, SHARE_COLORS
from overlaplab.view.stacking import ROW_IN, Part, stack, write_above
from overlaplab.view.units import percentages, share_text, shortened

_CHAR_PERCENT = 0.75  # width of a character of 8 points, in percent of a bar


def shares_bar(timelines: Mapping[str, Timeline]) -> Figure:
    """One bar a timeline: which share of its critical path computes, sends, waits.

    Args:
        timelines: by name.
    """
    if not timelines:
        raise ValueError("shares_bar got no timelines; expected {name: timeline, ...}")
    return stack([shares_part(timelines)])


def shares_part(timelines: Mapping[str, Timeline], remark: str = "") -> Part:
    """The bars as a part of a larger figure, a remark over them at the right."""

    names = [shortened(name) for name in timelines]

    def fill(ax: Axes) -> Iterable[str]:
        for row, timeline in enumerate(timelines.values()):
            _bar(ax, row, timeline)
        ax.set_facecolor("none")
        ax.set_xlim(0, 100)
        ax.set_ylim(len(timelines) - 0.5, -0.5)
        ax.set_yticks(range(len(timelines)), names)
        ax.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
        ax.tick_params(axis="y", length=0)
        ax.tick_params(labelsize=8.5, labelcolor=INK, color=INK)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color(INK)
        write_above(ax, "critical path", size=10, bold=True)
        write_above(ax, remark, size=9, right=True)
        return [f"share {share}" for share in SHARE_COLORS]

    said = "; ".join(
        f"{name}: {share_text(timeline.critical_path().shares_ns)}"
        for name, timeline in timelines.items()
    )
    alt = f"Critical path, {said}." + (f" {remark}." if remark else "")
    return Part(1.15 * ROW_IN * max(1, len(timelines)), names, fill, alt=alt)


def _bar(ax: Axes, row: int, timeline: Timeline) -> None:
    path = timeline.critical_path()
    length_ns = max(path.length_ns, 1)
    percents = percentages(path.shares_ns.values())
    left = 0.0
    for (share, share_ns), percent in zip(
        path.shares_ns.items(), percents, strict=True
    ):
        color, width = SHARE_COLORS[share], 100 * share_ns / length_ns
        if width == 0:
            continue
        ax.barh(
            row,
            width,
            left=left,
            height=0.72,
            color=color.face,
            edgecolor=color.edge,
            hatch=color.hatch or None,
            linewidth=0.5,
        )
        text = f"{share} {percent} %"
        if width < _CHAR_PERCENT * len(text) + 1:
            text = f"{percent} %"
        if width >= _CHAR_PERCENT * len(text) + 1:
            ax.text(
                left + width / 2,
                row,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color=color.text,
                bbox={"facecolor": f"{LABEL}D9", "edgecolor": "none", "pad": 0.8}
                if color.hatch
                else None,
            )
        left += width
