"""Axes one under the other in one figure, sized in inches, with one legend.

Knows how figures are put together, not what timelines are.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from overlaplab.view.inks import EXPOSED, HIGHLIGHT, INKS, PATH, SHARE_INKS, TEXT

WIDTH_IN = 10.0
DPI = 100
ROW_IN = 0.27  # one lane
TITLE_LINE_IN = 0.19

LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8,
    "ncols": 5,
    "handlelength": 2.2,
    "columnspacing": 1.4,
    "borderaxespad": 0.0,
}


class Picture(Figure):
    """A figure that a notebook shows once, as PNG, without pyplot's state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(facecolor="white", dpi=DPI, **kwargs)
        FigureCanvasAgg(self)

    def png(self) -> bytes:
        """The picture as the bytes of a PNG file."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


@dataclass(frozen=True, slots=True)
class Part:
    """One pair of axes of a stacked figure.

    Args:
        height_in: of the axes.
        labels: that stand to the left of the axes.
        draw: fills the axes; returns the legend's entries that it needs.
        num_title_lines: that stand above the line of the numbers.
    """

    height_in: float
    labels: Sequence[str]
    draw: Callable[[Axes], Iterable[str]]
    num_title_lines: int = 0


def stack(parts: Sequence[Part]) -> Picture:
    """Axes one under the other, their left edges aligned, one legend under all."""
    left_in = 0.35 + 0.075 * max((len(s) for p in parts for s in p.labels), default=0)
    above_in = [0.38 + TITLE_LINE_IN * p.num_title_lines for p in parts]
    below_in, legend_in = 0.32, 0.42
    height_in = legend_in + sum(above_in)
    height_in += sum(p.height_in + below_in for p in parts)
    figure = Picture(figsize=(WIDTH_IN, height_in))
    top_in = height_in
    used: dict[str, None] = {}
    for part, part_above_in in zip(parts, above_in, strict=True):
        bottom_in = top_in - part_above_in - part.height_in
        box = (
            left_in / WIDTH_IN,
            bottom_in / height_in,
            (WIDTH_IN - left_in - 0.2) / WIDTH_IN,
            part.height_in / height_in,
        )
        used.update(dict.fromkeys(part.draw(figure.add_axes(box))))
        top_in = bottom_in - below_in
    figure.legend(
        handles=legend_entries(used),
        **LEGEND,
        loc="upper left",
        bbox_to_anchor=(left_in / WIDTH_IN, legend_in / height_in),
    )
    return figure


def legend_entries(used: Iterable[str]) -> list[Patch | Line2D]:
    """The legend of the inks (and marks) in `used`, in the order of the inks."""
    used = set(used)
    entries: list[Patch | Line2D] = [
        ink.patch() for name, ink in INKS.items() if name in used
    ]
    # Beside lanes the shares have the colours that the lanes explain; idle has none.
    shares = {"idle": SHARE_INKS["idle"]} if entries else SHARE_INKS
    entries += [ink.patch() for name, ink in shares.items() if f"share {name}" in used]
    if "exposed" in used:
        entries.append(
            Patch(facecolor="none", edgecolor=EXPOSED, linewidth=1.6, label="exposed")
        )
    if "highlight" in used:
        entries.append(
            Patch(
                facecolor="none", edgecolor=HIGHLIGHT, linewidth=2.4, label="look here"
            )
        )
    if "path" in used:
        entries.append(Line2D([], [], color=PATH, linewidth=2.2, label="critical path"))
    return entries


def write_above(
    ax: Axes,
    text: str,
    above_pt: float = 7,
    *,
    size: float,
    right: bool = False,
    bold: bool = False,
) -> None:
    """Write over the axes, from their left edge or up to their right one."""
    side = 1 if right else 0
    ax.annotate(
        text,
        (side, 1),
        (0, above_pt),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=size,
        weight="bold" if bold else "normal",
        color=TEXT,
        annotation_clip=False,
    )
