"""Thousands of spans become a few rectangles that say the same."""

from hypothesis import given
from hypothesis import strategies as st

from overlaplab.timeline import Span
from overlaplab.view.colors import colors_of
from overlaplab.view.downsampling import rectangles


def kernels(*starts_and_ends):
    return [Span(0, "default", "compute", "mm", a, b) for a, b in starts_and_ends]


def painted(spans, columns=100, start=0, end=1000):
    return [
        (p.color, round(p.start_ns), round(p.end_ns), p.whole)
        for p in rectangles(spans, start, end, columns)
    ]


def test_a_span_of_a_column_or_more_stays_as_it_is():
    assert painted(kernels((13, 23), (100, 405))) == [
        ("compute", 13, 23, True),
        ("compute", 100, 405, True),
    ]


def test_short_spans_without_gaps_become_one_rectangle():
    spans = kernels(*[(i, i + 1) for i in range(200, 300)])
    assert painted(spans) == [("compute", 200, 300, False)]


def test_a_lane_that_is_half_busy_is_painted_half():
    spans = kernels(*[(i, i + 1) for i in range(0, 1000, 2)])
    covered = sum(end - start for _, start, end, _ in painted(spans))
    assert abs(covered - 500) <= 10


def test_a_single_short_span_stays_visible():
    assert painted(kernels((555, 556))) == [("compute", 550, 560, False)]


def test_what_lies_outside_the_window_is_cut():
    spans = kernels((0, 150), (300, 500), (950, 990))
    assert painted(spans, columns=10, start=100, end=400) == [
        ("compute", 100, 150, True),
        ("compute", 300, 400, True),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 40)), max_size=60),
    st.integers(1, 50),
)
def test_there_are_at_most_two_rectangles_a_column_and_lane(raw, columns):
    # One lane runs one span at a time: lay the drawn lengths one after another.
    spans, time = [], 0
    for gap, length in raw:
        spans += kernels((time + gap % 7, time + gap % 7 + length))
        time = spans[-1].end_ns
    end = max(time, 1)
    drawn = rectangles(spans, 0, end, columns)
    assert len(drawn) <= 2 * columns
    assert all(0 <= p.start_ns < p.end_ns <= end + end / columns for p in drawn)


def test_a_collective_waits_then_has_latency_then_wire():
    span = Span(
        0, "comm", "communication", "all_reduce", 10, 50,
        attributes={"ready_ns": 20, "latency_ns": 5, "wire_ns": 25},
    )  # fmt: skip
    assert colors_of(span) == [
        ("waiting", 10, 20),
        ("latency", 20, 25),
        ("wire", 25, 50),
    ]


def test_a_measured_collective_is_all_wire():
    span = Span(0, "comm", "communication", "all_reduce", 10, 50)
    assert colors_of(span) == [("wire", 10, 50)]
