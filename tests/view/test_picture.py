"""Figures: what is drawn where. How they look, a person has to judge."""

import base64
import html
import io
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from PIL import Image

from overlaplab.timeline import Span, Timeline
from overlaplab.view import draw, draw_many, shares_bar, table
from overlaplab.view.colors import EXPOSED
from overlaplab.view.stacking import Picture
from tests.view.steps import step


def row_labels(figure, axes=0):
    return [label.get_text() for label in figure.axes[axes].get_yticklabels()]


def texts(figure):
    return [t.get_text() for ax in figure.axes for t in ax.texts]


def legend(figure):
    return [t.get_text() for t in figure.texts]


def test_there_is_one_lane_a_rank_and_stream_cpu_first():
    assert row_labels(draw(step(ranks=2))) == [
        "rank 0  cpu",
        "rank 0  default",
        "rank 0  comm",
        "rank 1  cpu",
        "rank 1  default",
        "rank 1  comm",
    ]


def test_one_rank_needs_no_rank_in_its_labels():
    assert row_labels(draw(step())) == ["cpu", "default", "comm"]


def test_ranks_can_be_chosen():
    labels = row_labels(draw(step(ranks=3), ranks=[2, 1]))
    assert [label for label in labels if "comm" in label] == [
        "rank 1  comm",
        "rank 2  comm",
    ]


def test_more_than_eight_ranks_are_not_drawn_and_the_title_says_so():
    figure = draw(step(ranks=10, layers=1), title="many")
    assert len(row_labels(figure)) == 8 * 3
    assert "many  (8 ranks of 10)" in texts(figure)


def test_a_representative_rank_says_for_how_many_it_stands():
    timeline = Timeline(step().spans, represents=64)
    assert "(1 rank stands for 64)" in texts(draw(timeline))


def test_the_three_numbers_stand_over_the_lanes():
    mm = Span(0, "default", "compute", "mm", 0, 2_500_000)
    send = Span(0, "comm", "communication", "all_reduce", 0, 1_000_000)
    shown = texts(draw(Timeline.of([mm, send], origin="virtual")))
    assert "step 2.5 ms     exposed 0 ms     saved 1 ms" in shown


def test_what_was_saved_stands_there_only_where_one_run_shows_it():
    mm = Span(0, "default", "compute", "mm", 0, 2_500_000, attributes={"alone_ns": 1})
    send = Span(0, "comm", "communication", "all_reduce", 0, 1_000_000)
    slowed = Timeline.of([mm, send], origin="virtual")
    measured = Timeline.of([replace(mm, attributes={}), send])
    for timeline in (slowed, measured):
        assert "step 2.5 ms     exposed 0 ms" in texts(draw(timeline))
        said = str(table({"a": timeline}))
        assert " ?" in said.splitlines()[1] and "does not show it" in said


def test_a_kernel_slowed_by_a_nanosecond_leaves_what_was_saved_known():
    slowed = {"alone_ns": 2_499_999}
    mm = Span(0, "default", "compute", "mm", 0, 2_500_000, attributes=slowed)
    send = Span(0, "comm", "communication", "all_reduce", 0, 1_000_000)
    said = str(table({"a": Timeline.of([mm, send], origin="virtual")}))
    assert " ?" not in said.splitlines()[1]


def test_without_messages_the_step_stands_alone_over_the_lanes():
    line = Timeline.of([Span(0, "default", "compute", "mm", 0, 2_500_000)])
    assert "step 2.5 ms" in texts(draw(line))


def test_messages_carry_their_label_where_it_fits():
    figure = draw(step(ranks=1, latency_ns=500_000))
    assert {"bucket 0", "bucket 1"} <= set(texts(figure))


def test_of_messages_that_overlap_on_a_lane_only_the_longest_is_named():
    def sent(start, end, label):
        name = {"label": label}
        return Span(0, "comm", "communication", "all_reduce", start, end, 0, 0, name)

    line = Timeline.of([sent(0, 900, "long"), sent(100, 850, "short")])
    assert "long" in texts(draw(line))
    assert "short" not in texts(draw(line))


def test_the_legend_explains_what_is_there_and_nothing_else():
    compute_only = Timeline.of([Span(0, "default", "compute", "mm", 0, 100)])
    assert legend(draw(compute_only)) == ["compute", "critical path"]
    assert legend(draw(compute_only, critical_path=False)) == ["compute"]
    assert "exposed" in legend(draw(step(plan="serial")))


def test_a_step_with_everything_hidden_marks_nothing_exposed():
    hidden = [
        Span(0, "default", "compute", "mm", 0, 100),
        Span(0, "comm", "communication", "all_reduce", 10, 90),
    ]
    assert "exposed" not in legend(draw(Timeline.of(hidden)))


def test_three_thousand_spans_are_few_boxes():
    line = step(layers=24, kernels=30, plan="parameter", kernel_ns=9_000)
    figure = draw(line)
    (axes,) = figure.axes
    boxes = sum(len(patch.get_path().codes) // 5 for patch in axes.patches)
    assert len(line.spans) > 3000
    assert 0 < boxes < 2500


def test_many_timelines_share_one_scale():
    figure = draw_many({"short": step(layers=1), "long": step(layers=4)})
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert {"short", "long"} <= set(texts(figure))


def test_a_window_is_the_whole_width():
    figure = draw(step(), window=(1_000_000, 3_000_000))
    assert figure.axes[0].get_xlim() == (1.0, 3.0)


def test_times_count_from_the_first_start():
    late = [Span(0, "default", "compute", "mm", 7_000_000, 9_000_000)]
    figure = draw(Timeline.of(late))
    assert figure.axes[0].get_xlim() == (0.0, 2.0)


def test_one_rank_of_several_says_which():
    figure = draw(step(ranks=4), ranks=[2], title="bucketed")
    assert "bucketed  (rank 2 of 4)" in texts(figure)


def test_a_notebook_gets_a_figure_without_background_and_its_words_beside_it():
    figure = draw(step(), title="a <step>")
    data, metadata = figure._repr_mimebundle_()
    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as picture:
        assert picture.convert("RGBA").getpixel((0, 0))[3] == 0
    words = (
        "a <step>: timeline, step 15.91 ms, exposed 700 us, saved 685 us; lanes cpu, "
        "default, comm; critical path compute 95 %, wire 4 %, latency 1 %."
    )
    assert metadata == {"image/png": {"alt": words}}
    assert f'alt="{html.escape(words)}"' in data["text/html"]
    assert words in data["text/plain"]


def test_a_figure_without_words_is_refused():
    with pytest.raises(ValueError, match="alt is empty; expected what the figure"):
        Picture(alt=" ")


def test_bars_of_shares_say_them_in_words():
    assert shares_bar({"now": step(plan="serial")}).alt == (
        "Critical path, now: compute 92 %, wire 7 %, latency 1 %."
    )


def exposed_widths(figure):
    """Of the strips that mark exposed time, in the axis' unit."""
    (axes,) = figure.axes
    (marks,) = [
        p for p in axes.get_children()
        if isinstance(p, PathPatch) and to_hex(p.get_facecolor()).upper() == EXPOSED
    ]  # fmt: skip
    corners = marks.get_path().vertices.reshape(-1, 5, 2)
    return [(box[:, 0].max() - box[:, 0].min()).item() for box in corners]


def test_what_is_exposed_is_marked_as_wide_as_it_is():
    hides = [
        Span(0, "default", "compute", "mm", at, at + 980_000)
        for at in range(0, 10_000_000, 1_000_000)
    ]
    sent = Span(0, "comm", "communication", "all_reduce", 0, 9_980_000)
    widths = exposed_widths(draw(Timeline.of([*hides, sent])))
    assert widths == pytest.approx([0.02] * 9)


def dotted(figure):
    (axes,) = figure.axes
    (lines,) = [c for c in axes.collections if c.get_linestyle()[0][1] is not None]
    return [(line[0][0].item(), line[0][1].item()) for line in lines.get_segments()]


def test_the_beginning_of_a_step_is_marked_on_each_lane_where_it_is():
    spans = []
    for step_ in (3, 4):
        own = {"step": step_}
        late = (step_ - 3) * 1_000_000
        spans += [
            Span(0, "cpu", "launch", "launch mm", late, late + 9_000, attributes=own),
            Span(0, "default", "compute", "mm", 3 * late, 3 * late + 2_000_000,
                 attributes=own),
        ]  # fmt: skip
    figure = draw(Timeline.of(spans))
    assert dotted(figure) == [(1.0, 0), (3.0, 1)]
    assert "step 4" in texts(figure) and "step 3" not in texts(figure)
    (axes,) = figure.axes
    heights = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert heights["step 4"].y1 < heights["2 steps 5 ms"].y0


def test_lanes_stand_in_one_order_whatever_begins_first():
    spans = [
        Span(0, "copies", "memcpy", "copy", 0, 5),
        Span(0, "comm:1", "communication", "all_reduce", 3, 4),
        Span(0, "default", "compute", "mm", 5, 9),
        Span(0, "cpu", "launch", "launch mm", 6, 7),
    ]
    labels = row_labels(draw(Timeline.of(spans)))
    assert labels == ["cpu", "default", "comm:1", "copies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": [7]}, r"nothing to draw of ranks \[7\]; .* ranks \[0\]"),
        ({"window": (5, 5)}, "is empty"),
    ],
)
def test_what_is_not_there_cannot_be_drawn(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(step(), **arguments)


def test_nothing_to_draw_is_refused_by_name():
    with pytest.raises(ValueError, match="draw_many got no timelines"):
        draw_many({})
    with pytest.raises(ValueError, match="shares_bar got no timelines"):
        shares_bar({})


def test_an_empty_timeline_draws_an_empty_figure():
    assert draw(Timeline(())).axes


def test_bars_of_shares_reach_from_0_to_100():
    figure = shares_bar({"one": step(plan="serial"), "two": step()})
    for row in (0, 1):
        bars = [p for p in figure.axes[0].patches if round(p.get_y() + 0.36) == row]
        assert bars[0].get_x() == 0
        assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(100)
