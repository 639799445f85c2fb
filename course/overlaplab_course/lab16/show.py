"""What lab 16 shows: chains as tables, and time over budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from overlaplab.timeline import Timeline
from overlaplab.view.colors import MEMORY_COLORS
from overlaplab.view.stacking import Picture
from overlaplab_course import stored
from overlaplab_course.lab16 import chains
from overlaplab_course.lab16.chains import Block

MIB = 2**20
Points = Sequence[tuple[float, float]]
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
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
    figure = Picture(figsize=(8, 3.2))
    ax = figure.add_axes((0.09, 0.17, 0.6, 0.76))
    for (name, points), color, style in zip(
        lines.items(), _COLORS, _STYLES, strict=False
    ):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        ax.plot(xs, ys, style, color=color, label=name, markersize=5)
    ax.set_xlabel(across)
    ax.set_ylabel(up)
    ax.set_ylim(bottom=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.legend(loc="center left", bbox_to_anchor=(0.7, 0.6), frameon=False)
    return figure


def draw_memory(steps: Mapping[str, Timeline]) -> Figure:
    """The bytes that live, over the time of each step; of a single one by kind."""
    figure = Picture(figsize=(8, 3.2))
    ax = figure.add_axes((0.09, 0.17, 0.6, 0.76))
    for (name, step), color in zip(steps.items(), _COLORS, strict=False):
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
        color = "#333333" if len(steps) == 1 else color
        label = name if len(steps) > 1 else None
        ax.step(ms, total, where="post", color=color, linewidth=1.2, label=label)
        peak_ms = (memory.peak_ns - step.start_ns) / 1e6
        ax.plot([peak_ms], [memory.peak_bytes / MIB], "v", color=color, markersize=7)
    ax.set_xlabel("ms from the beginning of the step")
    ax.set_ylabel("MiB that live")
    ax.set_ylim(bottom=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles[::-1] if len(steps) == 1 else handles,
        labels[::-1] if len(steps) == 1 else labels,
        loc="center left",
        bbox_to_anchor=(0.7, 0.6),
        frameon=False,
    )
    return figure
