"""Which rectangles stand for thousands of spans, so that a picture draws at once.

A part that is at least one column (pixel) wide stays as it is. Narrower ones are
gathered: a column is painted once the parts owe a whole column of time, so that a
lane that is half busy looks half full, however short its spans. Knows no matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overlaplab.timeline import Span
from overlaplab.view.colors import colors_of

_LONELY = 4  # columns without anything before a short span that make it a single one


@dataclass(frozen=True, slots=True)
class Rectangle:
    """One rectangle."""

    color: str
    start_ns: float
    end_ns: float
    whole: bool  # drawn as it is, with an outline; else a run of gathered columns


def rectangles(
    spans: Iterable[Span], start_ns: int, end_ns: int, num_columns: int
) -> list[Rectangle]:
    """The rectangles of one lane within [start_ns, end_ns), gathered ones first."""
    column_ns = (end_ns - start_ns) / num_columns
    whole: list[Rectangle] = []
    narrow: dict[int, dict[str, float]] = {}
    for span in spans:
        for color, first, last in colors_of(span):
            first, last = max(first, start_ns), min(last, end_ns)
            if last - first >= column_ns > 0:
                whole.append(Rectangle(color, first, last, True))
            elif first < last:
                _gather(narrow, color, first - start_ns, last - start_ns, column_ns)
    return [*_runs(narrow, start_ns, column_ns), *whole]


def _gather(
    narrow: dict[int, dict[str, float]],
    color: str,
    first: int,
    last: int,
    column_ns: float,
) -> None:
    """Add a part narrower than a column to the one or two columns that it touches."""
    column = int(first / column_ns)
    border = (column + 1) * column_ns
    for index, length in (
        (column, min(last, border) - first),
        (column + 1, last - border),
    ):
        if length > 0:
            colors = narrow.setdefault(index, {})
            colors[color] = colors.get(color, 0.0) + length


def _runs(
    narrow: dict[int, dict[str, float]], start_ns: int, column_ns: float
) -> list[Rectangle]:
    """Painted columns, neighbours of one color joined."""
    runs: list[tuple[str, int, int]] = []
    owed = 0.0
    previous = -_LONELY
    for column in sorted(narrow):
        colors = narrow[column]
        owed += sum(colors.values()) / column_ns
        if column - previous >= _LONELY:
            owed = 1.0  # a single short span stays visible
        previous = column
        if owed < 1:
            continue
        owed -= 1
        color = max(colors, key=lambda name: colors[name])
        if runs and runs[-1][0] == color and runs[-1][2] == column:
            runs[-1] = (color, runs[-1][1], column + 1)
        else:
            runs.append((color, column, column + 1))
    return [
        Rectangle(color, start_ns + a * column_ns, start_ns + b * column_ns, False)
        for color, a, b in runs
    ]
