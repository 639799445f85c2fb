"""The lane of memory, as a picture and as text."""

from dataclasses import replace

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from overlaplab.timeline import Memory, Span, Timeline
from overlaplab.view import draw, draw_many, text
from overlaplab.view.colors import MEMORY_COLORS

MIB = 2**20


def timeline(peak=4 * MIB):
    spans = [Span(0, "default", "compute", "mm", 0, 800)]
    memory = Memory(
        0, ((0, peak // 4), (200, peak), (600, 0)), (("x", peak), ("fc.weight", MIB))
    )
    return replace(Timeline.of(spans), memory=(memory,))


def labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_the_lane_is_drawn_under_the_rank_s_own_where_it_is_asked_for():
    assert labels(draw(timeline())) == ["default"]
    assert labels(draw(timeline(), memory=True)) == ["default", "memory"]


def test_the_picture_says_the_peak_and_who_holds_it():
    written = [t.get_text() for t in draw(timeline(), memory=True).axes[0].texts]
    assert "peak 4 MiB; largest: x 4 MiB, fc.weight 1 MiB" in written


def test_two_timelines_have_one_scale():
    figure = draw_many({"a": timeline(), "b": timeline(8 * MIB)}, memory=True)
    tops = []
    for ax in figure.axes:
        points = ax.collections[0].get_paths()[0].vertices
        tops.append(points[:, 1].max() - points[:, 1].min())
    assert tops[1] == 2 * tops[0]


def test_as_text_a_column_shows_eighths_of_the_peak():
    row = next(
        line
        for line in text(timeline(), width=41, memory=True).splitlines()
        if "memory  " in line
    )
    assert row == "rank 0 memory  |" + 6 * "2" + 12 * "8" + 6 * " " + "|"


def test_a_timeline_that_knows_no_memory_has_no_lane():
    plain = replace(timeline(), memory=())
    assert labels(draw(plain, memory=True)) == ["default"]
    assert "memory" not in text(plain, memory=True)


def by_kind():
    (memory,) = timeline().memory
    parts = (MIB, 3 * MIB, 0), (0, MIB, 0)
    kinds = tuple(zip(("parameters", "activations"), parts, strict=True))
    return replace(timeline(), memory=(replace(memory, kinds=kinds),))


def test_kinds_are_stacked_each_in_the_color_that_the_legend_explains():
    figure = draw(by_kind(), memory=True)
    (ax,) = figure.axes
    fills = [c for c in ax.collections if isinstance(c, PolyCollection)]
    lower, upper, outline = fills
    tops = [c.get_paths()[0].vertices[:, 1].min() for c in (lower, upper, outline)]
    bottoms = [c.get_paths()[0].vertices[:, 1].max() for c in (lower, upper, outline)]
    assert tops[1] == tops[2] < tops[0]
    assert bottoms[0] == bottoms[2]
    colors = [to_hex(c.get_facecolor()[0]).upper() for c in (lower, upper)]
    assert colors == [MEMORY_COLORS[k].face for k in ("parameters", "activations")]
    explained = {text.get_text() for text in figure.texts}
    assert {"parameters", "activations"} <= explained and "shards" not in explained


def test_the_summary_says_what_the_peak_is_for():
    assert "peak 4 MiB: parameters 3 MiB, activations 1 MiB; largest: x" in text(
        by_kind(), memory=True
    )
