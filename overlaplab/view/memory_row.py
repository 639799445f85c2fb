"""A rank's memory under its lanes: its kinds, one on the other, and its peak."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes

from overlaplab.timeline import Memory
from overlaplab.view.colors import INK, MEMORY_COLORS
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
) -> list[str]:
    """Fill the bytes over time between `y` (above) and `y + ROWS` (zero bytes).

    Returns what the legend must explain: "memory parameters", ...

    Args:
        top_bytes: what the full height stands for.
        window: (start_ns, end_ns) that is shown.
        x: from nanoseconds to the axis' unit.
    """
    bottom, height = y + ROWS - 0.1, ROWS * _CURVE

    def fill(sizes: Sequence[int], above: Sequence[int], **style: Any) -> None:
        times, tops = _within(memory, sizes, window), _within(memory, above, window)
        ax.fill_between(
            [x(time_ns) for time_ns, _ in times],
            [bottom - height * size / max(top_bytes, 1) for _, size in tops],
            [bottom - height * size / max(top_bytes, 1) for _, size in times],
            step="post",
            zorder=2,
            **style,
        )

    used = []
    below = [0] * len(memory.steps)
    for kind, sizes in memory.kinds:
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        fill(below, above, facecolor=MEMORY_COLORS[kind].face, linewidth=0)
        below = above
        used.append(f"memory {kind}")
    outline = {"facecolor": "none" if used else _FACE, "edgecolor": _EDGE}
    all_bytes = [size for _, size in memory.steps]
    fill([0] * len(all_bytes), all_bytes, linewidth=0.8, **outline)
    start_ns, end_ns = window
    place = (memory.peak_ns - start_ns) / max(end_ns - start_ns, 1)
    if 0 <= place <= 1:
        peak_y = bottom - height * memory.peak_bytes / max(top_bytes, 1)
        ax.plot([x(memory.peak_ns)], [peak_y], "v", color=INK, markersize=4, zorder=3)
    ax.annotate(
        summary(memory, short=True),
        (min(max(place, 0.0), 1.0), y + 0.34),
        xycoords=("axes fraction", "data"),
        fontsize=7.5,
        color=INK,
        va="center",
        ha="left" if place < 0.35 else "right" if place > 0.65 else "center",
        zorder=6,
    )
    return used


def summary(memory: Memory, *, short: bool = False) -> str:
    """The peak, what for, and who holds most of it, in one line.

    Args:
        short: three kinds and one allocation, where kinds are known; else all kinds of
            at least a hundredth of the peak, and three allocations.

    >>> holders = ("w", 2**21), ("x", 2**20)
    >>> summary(Memory(0, ((0, 3 * 2**20),), holders))
    'peak 3 MiB; largest: w 2 MiB, x 1 MiB'
    >>> kinds = ("parameters", (2**20,)), ("inputs", (2**21,))
    >>> summary(Memory(0, ((0, 3 * 2**20),), holders[:1], kinds))
    'peak 3 MiB: inputs 2 MiB, parameters 1 MiB; largest: w 2 MiB'
    """
    peak = f"peak {format_bytes(memory.peak_bytes)}"
    kinds = sorted(memory.kinds_at(memory.peak_ns), key=lambda kind: -kind[1])
    large = [kind for kind in kinds if 100 * kind[1] >= memory.peak_bytes]
    if large:
        peak += f": {_list(large[:_NAMED] if short else large)}"
    holders = memory.holders[: 1 if short and large else _NAMED]
    named = [(_short(name), size) for name, size in holders]
    return f"{peak}; largest: {_list(named)}" if named else peak


def _list(sizes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes)


def at(memory: Memory, time_ns: int) -> int:
    """The bytes that live at a time, 0 before the first step."""
    place = _place(memory, time_ns)
    return memory.steps[place][1] if place >= 0 else 0


def _place(memory: Memory, time_ns: int) -> int:
    """Of the step that lasts at a time, -1 before the first."""
    return bisect_right(memory.steps, (time_ns, math.inf)) - 1


def _within(
    memory: Memory, sizes: Sequence[int], window: tuple[int, int]
) -> list[tuple[int, int]]:
    start_ns, end_ns = window
    times = [time_ns for time_ns, _ in memory.steps]
    inside = [
        (t, size) for t, size in zip(times, sizes, strict=True) if start_ns < t < end_ns
    ]
    ends = (_place(memory, time_ns) for time_ns in window)
    first, last = (sizes[place] if place >= 0 else 0 for place in ends)
    return [(start_ns, first), *inside, (end_ns, last)]


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."
