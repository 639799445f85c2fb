"""Figures of the lessons: quiet axes, and boxes, arrows and words for small pictures.

One ink for light and dark pages, no background, and words for those who do not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from overlaplab.view.colors import COLORS, INK, MEMORY_COLORS
from overlaplab.view.stacking import Picture

SENT = COLORS["wire"].face
COMPUTED = COLORS["compute"].face
PALE = "#80808033"
LINES = (COMPUTED, "#D55E00", "#009E73", "#CC79A7")  # of curves, in this order

# Words on a face; on others they have the ink of the page.
_ON = {color.face: color.text for color in COLORS.values()}
_ON |= {color.face: "#222222" for color in MEMORY_COLORS.values()}

Points = Sequence[tuple[float, float]]
Place = tuple[float, float]


def quiet_axes(
    figure: Picture,
    place: tuple[float, float, float, float],
    across: str = "",
    up: str = "",
) -> Axes:
    """Axes without a box, in the ink of the page.

    Args:
        place: left, bottom, width, height, as fractions of the figure.
        across, up: what the axes mean.
    """
    ax: Axes = figure.add_axes(place)
    ax.set_facecolor("none")
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["bottom", "left"]].set_color(INK)
    ax.tick_params(which="both", color=INK, labelcolor=INK)
    ax.set_xlabel(across, color=INK)
    ax.set_ylabel(up, color=INK)
    return ax


def legend(figure: Picture, left: float, *, upwards: bool = False) -> None:
    """What the lines are called, at the right of the axes.

    Args:
        left: a fraction of the figure.
        upwards: the last one on top, as areas are stacked.
    """
    handles, labels = figure.axes[0].get_legend_handles_labels()
    order = -1 if upwards else 1
    figure.legend(
        handles[::order],
        labels[::order],
        loc="center left",
        bbox_to_anchor=(left, 0.6),
        frameon=False,
        labelcolor=INK,
    )


def in_words(lines: Mapping[str, Points], across: str, up: str) -> str:
    """Curves in words: where each begins, is lowest and ends."""
    said = []
    for name, points in lines.items():
        if not points:
            said.append(f"{name}: no points.")
            continue
        first, last, low = points[0], points[-1], min(points, key=lambda p: p[1])
        lowest = f", lowest {low[1]:.4g} at {low[0]:.4g}"
        said.append(
            f"{name}: {first[1]:.4g} at {first[0]:.4g}"
            f"{lowest if low not in (first, last) else ''}, "
            f"{last[1]:.4g} at {last[0]:.4g}."
        )
    return " ".join([f"{up} over {across}.", *said])


class Drawing:
    """A small picture: boxes, arrows and words, in units of its own, y downwards.

    Args:
        size: width and height in units; a unit is 0.1 inch.
        alt: what it shows, in words.
    """

    def __init__(self, size: tuple[float, float], alt: str) -> None:
        width, height = size
        self.figure = Picture(alt=alt, figsize=(width / 10, height / 10))
        self._ax = self.figure.add_axes((0, 0, 1, 1))
        self._ax.set_axis_off()
        self._ax.set_xlim(0, width)
        self._ax.set_ylim(height, 0)

    def box(
        self,
        place: Place,
        size: tuple[float, float],
        text: str = "",
        *,
        face: str = "none",
        hatched: bool = False,
    ) -> None:
        """A box with its upper left corner at `place`; dark words on what is bright."""
        (x, y), (width, height) = place, size
        self._ax.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.4",
                facecolor=face,
                edgecolor=COLORS["wire"].edge if hatched else INK,
                linewidth=1,
                hatch=COLORS["wire"].hatch if hatched else None,
            )
        )
        self._ax.text(
            x + width / 2,
            y + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color=_ON.get(face, INK),
            bbox={"facecolor": face, "edgecolor": "none", "pad": 0.8}
            if hatched and text
            else None,
        )

    def words(
        self,
        place: Place,
        text: str,
        *,
        align: str = "left",
        bold: bool = False,
        size: float = 9,
        color: str = INK,
    ) -> None:
        """Words at a place; `align` says which side of them stands there."""
        self._ax.text(
            *place,
            text,
            ha=align,
            va="center",
            fontsize=size,
            color=color,
            weight="bold" if bold else "normal",
        )

    def arrow(self, start: Place, end: Place, *, color: str = INK) -> None:
        """A straight arrow."""
        self._ax.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=11,
                color=color,
                linewidth=1.3,
                shrinkA=0,
                shrinkB=0,
            )
        )

    def line(self, start: Place, end: Place) -> None:
        """A thin dotted line."""
        (x0, y0), (x1, y1) = start, end
        self._ax.plot([x0, x1], [y0, y1], ":", color=INK, linewidth=1.2)

    def stripe(self, place: Place, size: tuple[float, float], face: str) -> None:
        """A part of a box, without an outline."""
        self._ax.add_patch(Rectangle(place, *size, facecolor=face, edgecolor="none"))

    def frame(
        self, place: Place, size: tuple[float, float], color: str, *, wide: bool = False
    ) -> None:
        """The outline of a box; in ink where no color is given."""
        edge, width = color or INK, 2.4 if wide else 1.0
        self._ax.add_patch(
            Rectangle(place, *size, facecolor="none", edgecolor=edge, linewidth=width)
        )

    def bucket(self, place: Place, size: tuple[float, float]) -> None:
        """Three sides of a box, open at the top."""
        (x, y), (width, height) = place, size
        xs, ys = [x, x, x + width, x + width], [y, y + height, y + height, y]
        self._ax.plot(xs, ys, color=INK, linewidth=2, solid_joinstyle="round")

    def flag(self, top: Place, foot: Place) -> None:
        """A mark in a stream: a pole with a knob on it."""
        (x, y), (_, low) = top, foot
        self._ax.plot([x, x], [y, low], color=LINES[3], linewidth=2)
        self._ax.plot([x], [y], "o", color=LINES[3], markersize=6)
