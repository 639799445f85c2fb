"""Axes one under the other in one figure, sized in inches, with one legend.

Knows how figures are put together, not what timelines are.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from overlaplab.errors import printable
from overlaplab.view.colors import (
    COLORS,
    EXPOSED,
    INK,
    MEMORY_COLORS,
    PATH,
    SHARE_COLORS,
)

Entry = Patch | Line2D  # of a legend

WIDTH_IN = 10.0
DPI = 100
ROW_IN = 0.27  # one lane
TITLE_LINE_IN = 0.19

_ABOVE_IN, _BELOW_IN = 0.38, 0.32  # for titles and for the time axis
_LEGEND_ROW_IN = 0.18
_CHAR_IN = 0.07  # a character of the legend's 8.5 points, on the wide side


class Picture(Figure):
    """A figure that a notebook shows once, as PNG, without pyplot's state.

    It has no background: the page's shows, light or dark.

    Args:
        alt: what it shows, in words, for those who do not see it.
        kwargs: matplotlib's.
    """

    def __init__(self, *, alt: str, **kwargs: Any) -> None:
        if not alt.strip():
            raise ValueError("alt is empty; expected what the figure shows, in words")
        super().__init__(facecolor="none", dpi=DPI, **kwargs)
        FigureCanvasAgg(self)
        self.alt = printable(" ".join(alt.split()))

    def __repr__(self) -> str:
        return f"<figure: {self.alt}>"

    def png(self) -> bytes:
        """The picture as the bytes of a PNG file."""
        # savefig does the same in half as much time again, and sliders wait for it.
        canvas: Any = self.canvas
        canvas.draw()
        size = canvas.get_width_height()
        image = Image.frombuffer("RGBA", size, canvas.buffer_rgba())
        buffer = io.BytesIO()
        image.save(buffer, "png", compress_level=1)
        return buffer.getvalue()

    def html(self) -> str:
        """The picture as an element of a page, with its words."""
        return _IMG.format(html.escape(self.alt), _base64(self.png()))

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """As PNG; and as HTML, since JupyterLab has no words for a PNG."""
        png, alt = _base64(self.png()), self.alt
        data = {
            "image/png": png,
            "text/html": _IMG.format(html.escape(alt), png),
            "text/plain": repr(self),
        }
        return data, {"image/png": {"alt": alt}}


_IMG = (
    '<img class="olt-figure" style="max-width: 100%; height: auto" alt="{}" '
    'src="data:image/png;base64,{}">'
)


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode("ascii")


@dataclass(frozen=True, slots=True)
class Part:
    """One pair of axes of a stacked figure."""

    height_in: float  # of the axes
    labels: Sequence[str]  # that stand to the left of the axes
    # fills the axes; returns the legend's entries that it needs
    draw: Callable[[Axes], Iterable[str]]
    alt: str  # what they show, in words
    num_title_lines: int = 0  # that stand above the line of the numbers


def stack(parts: Sequence[Part]) -> Picture:
    """Axes one under the other, their left edges aligned, one legend under all.

    Names come from outside: a "$" in them is no formula.
    """
    with rc_context({"text.parse_math": False}):
        return _stack(parts)


def _stack(parts: Sequence[Part]) -> Picture:
    left_in = 0.35 + 0.08 * max((len(s) for p in parts for s in p.labels), default=0)
    width_in = WIDTH_IN - left_in - 0.2
    alt = " ".join(part.alt for part in parts)
    figure = Picture(alt=alt, figsize=(WIDTH_IN, 1))
    stacked: list[tuple[Axes, float, float]] = []  # axes, height, bottom below the top
    used: dict[str, None] = {}
    below_top_in = 0.0
    for part in parts:
        ax = figure.add_axes((left_in / WIDTH_IN, 0, width_in / WIDTH_IN, 1))
        used.update(dict.fromkeys(part.draw(ax)))
        below_top_in += _ABOVE_IN + TITLE_LINE_IN * part.num_title_lines
        below_top_in += part.height_in
        stacked.append((ax, part.height_in, below_top_in))
        below_top_in += _BELOW_IN
    legend = _rows_of_legend(legend_entries(used), left_in)
    height_in = below_top_in + _LEGEND_ROW_IN * len(legend) + 0.08
    figure.set_size_inches(WIDTH_IN, height_in)
    for ax, ax_height_in, bottom_in in stacked:
        ax.set_position(
            (
                left_in / WIDTH_IN,
                (height_in - bottom_in) / height_in,
                width_in / WIDTH_IN,
                ax_height_in / height_in,
            )
        )
    _write_legend(figure, legend, height_in - below_top_in)
    return figure


def _rows_of_legend(
    entries: Iterable[Entry], left_in: float
) -> list[list[tuple[float, Entry]]]:
    """Entries with their left edges, in as many rows as they need."""
    rows: list[list[tuple[float, Entry]]] = []
    x_in = WIDTH_IN
    for entry in entries:
        entry_in = 0.52 + _CHAR_IN * len(str(entry.get_label()))
        if x_in + entry_in > WIDTH_IN:
            rows.append([])
            x_in = left_in
        rows[-1].append((x_in, entry))
        x_in += entry_in
    return rows


def _write_legend(
    figure: Figure, rows: Iterable[Iterable[tuple[float, Entry]]], top_in: float
) -> None:
    """Figure.legend measures every text many times, a third of the drawing time."""
    inches = figure.dpi_scale_trans
    for number, row in enumerate(rows):
        y_in = top_in - _LEGEND_ROW_IN * (number + 0.5)
        for x_in, entry in row:
            key: Artist
            if isinstance(entry, Line2D):
                key = Line2D([x_in, x_in + 0.25], [y_in, y_in])
            else:
                key = Rectangle((x_in, y_in - 0.045), 0.25, 0.09)
            key.update_from(entry)
            key.set_transform(inches)
            figure.add_artist(key)
            figure.text(
                x_in + 0.32,
                y_in - 0.01,
                str(entry.get_label()),
                transform=inches,
                fontsize=8.5,
                va="center",
                color=INK,
            )


def legend_entries(used: Iterable[str]) -> list[Entry]:
    """The legend of the colors (and marks) in `used`, in the order of the colors."""
    used = set(used)
    entries: list[Entry] = [
        color.patch() for name, color in COLORS.items() if name in used
    ]
    # Beside lanes the shares have the colours that the lanes explain; idle has none.
    shares = {"idle": SHARE_COLORS["idle"]} if entries else SHARE_COLORS
    entries += [
        color.patch() for name, color in shares.items() if f"share {name}" in used
    ]
    entries += [
        color.patch()
        for kind, color in MEMORY_COLORS.items()
        if f"memory {kind}" in used
    ]
    if "exposed" in used:
        entries.append(Patch(facecolor=EXPOSED, edgecolor="none", label="exposed"))
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
        color=INK,
        annotation_clip=False,
    )
