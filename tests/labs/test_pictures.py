"""The drawings of the lessons: each has its words, and shows what it says."""

import inspect

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle

from overlaplab.view.stacking import Picture
from overlaplab_course import pictures
from overlaplab_course.drawing import COMPUTED, in_words

DRAWINGS = [
    make
    for name, make in inspect.getmembers(pictures, inspect.isfunction)
    if make.__module__ == pictures.__name__ and not name.startswith("_")
]


@pytest.mark.parametrize("make", DRAWINGS, ids=lambda make: make.__name__)
def test_a_drawing_says_what_it_shows_and_stays_within_its_page(make):
    figure = make()
    assert isinstance(figure, Picture) and len(figure.alt.split()) > 20
    figure.canvas.draw()
    whole = figure.bbox
    for text in (t for ax in figure.axes for t in ax.texts if t.get_text()):
        box = text.get_window_extent()
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1, text.get_text()
        assert whole.y0 <= box.y0 and box.y1 <= whole.y1, text.get_text()


def test_in_the_ring_each_rank_sends_four_thirds_and_all_end_with_all_sums():
    (axes,) = pictures.ring_all_reduce().axes
    arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    # Three ranks send in each of four frames; one arrow of each frame is in two parts.
    assert len(arrows) == 4 * (3 + 1)
    stripes = [
        (p.get_x(), to_hex(p.get_facecolor()).upper())
        for p in axes.patches
        if isinstance(p, Rectangle) and p.get_edgecolor()[3] == 0
    ]
    last = [color for x, color in stripes if x >= 3 + 24 * 3]
    assert last == [COMPUTED] * 27


def test_curves_are_said_by_their_ends_and_their_lowest_point():
    lines = {"a": [(1, 5), (2, 3), (4, 9)], "down": [(1, 2), (4, 1)], "none": []}
    assert in_words(lines, "size", "ms") == (
        "ms over size. a: 5 at 1, lowest 3 at 2, 9 at 4. down: 2 at 1, 1 at 4. "
        "none: no points."
    )
