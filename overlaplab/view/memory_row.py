"""A rank's memory under its lanes: a filled curve, its peak, and who holds it."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes

from overlaplab.timeline import Memory
from overlaplab.view.colors import TEXT
from overlaplab.view.units import format_bytes

ROWS = 2.0  # height, in lanes
_FACE, _EDGE = "#E8D5E3", "#CC79A7"
_CURVE = 0.6  # of the height; the line of text is above
_NAMED = 3


def draw_memory(
    ax: Axes,
    memory: Memory,
    *,
    y: float,
    top_bytes: int,
    window: tuple[int, int],
    x: Callable[[float], float],
) -> None:
    """Fill the bytes over time between `y` (above) and `y + ROWS` (zero bytes).

    Args:
        top_bytes: what the full height stands for.
        window: (start_ns, end_ns) that is shown.
        x: from nanoseconds to the axis' unit.
    """
    bottom, height = y + ROWS - 0.1, ROWS * _CURVE
    times, tops = [], []
    for time_ns, size in _within(memory, window):
        times.append(x(time_ns))
        tops.append(bottom - height * size / max(top_bytes, 1))
    ax.fill_between(
        times,
        tops,
        bottom,
        step="post",
        facecolor=_FACE,
        edgecolor=_EDGE,
        linewidth=0.8,
        zorder=2,
    )
    start_ns, end_ns = window
    place = (memory.peak_ns - start_ns) / max(end_ns - start_ns, 1)
    if 0 <= place <= 1:
        peak_y = bottom - height * memory.peak_bytes / max(top_bytes, 1)
        ax.plot([x(memory.peak_ns)], [peak_y], "v", color=TEXT, markersize=4, zorder=3)
    ax.annotate(
        summary(memory),
        (min(max(place, 0.0), 1.0), y + 0.34),
        xycoords=("axes fraction", "data"),
        fontsize=7,
        color=TEXT,
        va="center",
        ha="left" if place < 0.35 else "right" if place > 0.65 else "center",
        zorder=6,
    )


def summary(memory: Memory) -> str:
    """The peak and who holds most of it, in one line.

    >>> summary(Memory(0, ((0, 3 * 2**20),), (("w", 2**21), ("x", 2**20))))
    'peak 3 MiB; largest: w 2 MiB, x 1 MiB'
    """
    named = [
        f"{_short(name)} {format_bytes(size)}" for name, size in memory.holders[:_NAMED]
    ]
    peak = f"peak {format_bytes(memory.peak_bytes)}"
    return f"{peak}; largest: {', '.join(named)}" if named else peak


def at(memory: Memory, time_ns: int) -> int:
    """The bytes that live at a time, 0 before the first step."""
    held = 0
    for since_ns, size in memory.steps:
        if since_ns > time_ns:
            break
        held = size
    return held


def _within(memory: Memory, window: tuple[int, int]) -> list[tuple[int, int]]:
    start_ns, end_ns = window
    inside = [(t, size) for t, size in memory.steps if start_ns < t < end_ns]
    first, last = at(memory, start_ns), at(memory, end_ns)
    return [(start_ns, first), *inside, (end_ns, last)]


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."
