"""What lab 16 shows: chains as tables, and time over budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from overlaplab.timeline import Timeline
from overlaplab.view.colors import INK, MEMORY_COLORS
from overlaplab.view.stacking import Picture
from overlaplab_course import stored
from overlaplab_course.drawing import LINES, Points, in_words, legend, quiet_axes
from overlaplab_course.lab16 import chains
from overlaplab_course.lab16.chains import Block

MIB = 2**20
_STYLES = ("o-", "s--", "^:", "D-.")


def chain_table(blocks: Sequence[Block]) -> str:
    """A row for each block."""
    rows = [(i, b.input, b.inside, b.work, b.ms) for i, b in enumerate(blocks)]
    head = ("block", "input, MiB", "inside, MiB", "work, MiB", "forward, ms")
    return stored.text_table(head, rows)


def draw_budgets(
    blocks: Sequence[Block],
    budgets: Sequence[int],
    ways: Mapping[str, Callable[[Sequence[Block], int], Any]],
) -> Figure:
    """What each way computes again, over the budget; no point where it finds nothing
    or its choice does not fit.
    """
    lines: dict[str, Points] = {}
    for name, way in ways.items():
        found = ((budget, way(blocks, budget)) for budget in budgets)
        lines[name] = [
            (budget, chains.extra_ms(blocks, again))
            for budget, again in found
            if again is not None and chains.peak_of(blocks, again) <= budget
        ]
    return draw_curves(lines, "budget, MiB", "computed again, ms")


def most_lost(
    blocks: Sequence[Block],
    budgets: Sequence[int],
    ways: Mapping[str, Callable[[Sequence[Block], int], Any]],
) -> dict[str, float]:
    """By how many percent each way computes more again than the first, at worst.

    Where the first computes hardly anything again, percents say little: left out.
    """
    first, *others = ways
    found = dict.fromkeys(others, 0.0)
    for budget in budgets:
        best = ways[first](blocks, budget)
        least = 0 if best is None else chains.extra_ms(blocks, best)
        for name in others if least >= 10 else ():
            extra = chains.extra_ms(blocks, ways[name](blocks, budget))
            found[name] = max(found[name], 100 * (extra / least - 1))
    return found


def draw_curves(lines: Mapping[str, Points], across: str, up: str) -> Figure:
    """One line for each name, points marked."""
    figure = Picture(alt=in_words(lines, across, up), figsize=(8, 3.2))
    ax = quiet_axes(figure, (0.09, 0.17, 0.6, 0.76), across, up)
    for (name, points), color, style in zip(
        lines.items(), LINES, _STYLES, strict=False
    ):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        ax.plot(xs, ys, style, color=color, label=name, markersize=5)
    ax.set_ylim(bottom=0)
    legend(figure, 0.7)
    return figure


def draw_memory(steps: Mapping[str, Timeline]) -> Figure:
    """The bytes that live, over the time of each step; of a single one by kind."""
    peaks = "; ".join(f"{name}: {_peak(step)}" for name, step in steps.items())
    alt = f"Bytes that live over the time of a step. {peaks}."
    figure = Picture(alt=alt, figsize=(8, 3.2))
    across, up = "ms from the beginning of the step", "MiB that live"
    ax = quiet_axes(figure, (0.09, 0.17, 0.6, 0.76), across, up)
    for (name, step), color in zip(steps.items(), LINES, strict=False):
        (memory,) = step.memory
        inside = [i for i, (t, _) in enumerate(memory.steps) if t >= step.start_ns]
        ms = [(memory.steps[i][0] - step.start_ns) / 1e6 for i in inside]
        below = [0.0] * len(inside)
        if len(steps) == 1:
            for kind, sizes in memory.kinds:
                above = [b + sizes[i] / MIB for b, i in zip(below, inside, strict=True)]
                face = MEMORY_COLORS[kind].face
                ax.fill_between(
                    ms, below, above, step="post", color=face, lw=0, label=kind
                )
                below = above
        total = [memory.steps[i][1] / MIB for i in inside]
        color = INK if len(steps) == 1 else color
        label = name if len(steps) > 1 else None
        ax.step(ms, total, where="post", color=color, linewidth=1.2, label=label)
        peak_ms = (memory.peak_ns - step.start_ns) / 1e6
        ax.plot([peak_ms], [memory.peak_bytes / MIB], "v", color=color, markersize=7)
    ax.set_ylim(bottom=0)
    legend(figure, 0.7, upwards=len(steps) == 1)
    return figure


def _peak(step: Timeline) -> str:
    (memory,) = step.memory
    at_ms = (memory.peak_ns - step.start_ns) / 1e6
    return f"peak {memory.peak_bytes / MIB:.0f} MiB at {at_ms:.1f} ms"
