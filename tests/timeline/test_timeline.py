"""Timelines: order, lanes, parts."""

import subprocess
import sys

import pytest

from overlaplab.timeline import Span, Timeline
from tests.timeline.spans import compute, host, launch, resolved, send

LINE = resolved(
    (launch(0, 2), None),
    (launch(0, 3, rank=1), None),
    (compute(2, 10), 0),
    (compute(3, 12, rank=1), 1),
    (send(10, 20), 3),
    (send(12, 20, rank=1), 3),
    num_ranks=2,
)


def test_order_is_one_line_a_span():
    assert LINE.order().splitlines() == [
        "0 cpu launch mm 0-2",
        "1 cpu launch mm 0-3",
        "0 default mm 2-10",
        "1 default mm 3-12",
        "0 comm all_reduce 10-20",
        "1 comm all_reduce 12-20",
    ]


def test_order_can_leave_the_cpu_out():
    assert LINE.of_rank(0).order(("compute", "communication")).splitlines() == [
        "0 default mm 2-10",
        "0 comm all_reduce 10-20",
    ]


def test_measured_spans_are_put_in_order():
    line = Timeline.of([send(5, 9), compute(5, 9, rank=1), compute(0, 5), launch(0, 1)])
    assert [(s.rank, s.lane) for s in line.spans] == [
        (0, "cpu"),
        (0, "default"),
        (0, "comm"),
        (1, "default"),
    ]
    assert line.num_ranks == 2


def test_the_cpu_lane_comes_first_though_a_stream_started_earlier():
    line = Timeline.of([compute(0, 5), send(1, 2), host(3, 4)])
    assert line.lanes(0) == ["cpu", "default", "comm"]


def test_a_part_keeps_the_causes_within_it():
    assert LINE.of_rank(1).causes == (None, 0, 1)
    assert LINE.of_rank(0).causes == (None, 0, None)


def test_between_keeps_what_lies_within():
    assert LINE.between(2, 12).order().splitlines() == [
        "0 default mm 2-10",
        "1 default mm 3-12",
    ]


def test_a_step_is_the_slowest_rank_s_and_not_the_spread_of_their_clocks():
    line = Timeline.of([compute(0, 10), compute(100, 115, rank=1)])
    assert line.step_ns == 15
    assert (line.start_ns, line.end_ns) == (0, 115)


def test_a_span_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match="ends at 3 ns, before it starts at 5 ns"):
        Span(0, "default", "compute", "mm", 5, 3)


def test_a_span_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="span kind 'kernel'"):
        Span(0, "default", "kernel", "mm", 0, 1)


def test_no_torch_and_no_numpy_is_needed():
    code = (
        "import sys, overlaplab.timeline; "
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


def test_a_timeline_prints_as_one_line():
    span = Span(1, "default", "compute", "mm", 5, 105, attributes={"step": 3})

    shown = repr(Timeline.of([span] * 1000))

    assert shown == "<Timeline of 2 ranks, 1 step: 1000 spans in 100 ns, trace>"
