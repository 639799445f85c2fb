"""What lab 01 shows: the figure of its messages, and steps measured on real GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from overlaplab.view.colors import INK
from overlaplab.view.stacking import Picture
from overlaplab_course import stored
from overlaplab_course.drawing import LINES, in_words, legend, quiet_axes
from overlaplab_course.lab01.given import Times
from overlaplab_course.lab01.messages import Counted


def draw_counted(counted: Sequence[Counted]) -> Figure:
    """One message, all in a row, and the step, over the number of messages."""
    numbers, ones, sums, steps = zip(*counted, strict=True)
    drawn = (  # the wide one is seen under the thin
        ("one message", ones, LINES[1], "s--", 1.5),
        ("all messages in a row", sums, "#7fceb9", "-", 6),
        ("backward pass with messages", steps, LINES[0], "o-", 1.5),
    )
    lines = {name: list(zip(numbers, ms, strict=True)) for name, ms, *_ in drawn}
    across = "messages that share the gigabyte"
    figure = Picture(alt=in_words(lines, across, "ms"), figsize=(9, 3.2))
    ax = quiet_axes(figure, (0.08, 0.17, 0.6, 0.75), across, "ms")
    for name, values, color, style, width in drawn:
        look: Any = {"color": color, "label": name, "markersize": 5, "linewidth": width}
        ax.plot(numbers, values, style, **look)
    best = min(counted, key=lambda c: c.step_ms)
    star = [best.num_messages], [best.step_ms]
    ax.plot(*star, "*", color=INK, markersize=13, zorder=5)
    ax.set_xscale("log")
    ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    ax.set_ylim(0, None)
    legend(figure, 0.69)
    return figure


# Steps timed without a profiler, ratios from traces; both of one run a link.

STORED = stored.read("01") or {"rows": ()}
measure_it_here = partial(
    stored.measure_it_here, "python -m overlaplab.bench traces --folder FOLDER"
)


@dataclass(frozen=True)
class Measured(Times):
    """One variant on one link; sent and hidden are of one profiled step."""

    # low, high: between which eight of ten steps lie
    low: float
    high: float
    link: str  # "NVLink" or "P2P off"
    batch: int  # sequences per GPU; compare rows of one link and batch only
    name: str  # of the variant


def measured() -> tuple[Measured, ...]:
    """Every stored step with overlap; tm is what one message for all adds to tc."""
    return tuple(
        Measured(
            tc=row["compute_ms"],
            tm=row["serial_ms"] - row["compute_ms"],
            sent=variant["sent_ms"],
            hidden=variant["hidden_ms"],
            step=variant["median_ms"],
            low=variant["p10_p90_ms"][0],
            high=variant["p10_p90_ms"][1],
            link=row["link"],
            batch=row["batch"],
            name=name,
        )
        for row in STORED["rows"]
        for name, variant in row["variants"].items()
    )


def measured_alone() -> tuple[str, ...]:
    """What Tc and Tm are made of, with its spread, a line each link."""

    def spread(median_ms: float, low_high_ms: Sequence[float]) -> str:
        return "{:.1f} ms ({:.1f} to {:.1f})".format(median_ms, *low_high_ms)

    return tuple(
        f"{row['link']}, batch {row['batch']}: compute alone "
        f"{spread(row['compute_ms'], row['compute_p10_p90_ms'])},\n"
        "    with one message for all behind it "
        f"{spread(row['serial_ms'], row['serial_p10_p90_ms'])}"
        for row in STORED["rows"]
    )


def machine() -> str:
    """Where and when, one line."""
    return f"Measured on {stored.machine(STORED)}."
