"""The critical path: which chain, and its shares."""

from hypothesis import given

from overlaplab.timeline import SHARES, Span, Timeline
from tests.timeline.spans import compute, host, launch, random_timelines, resolved, send


def path(timeline):
    return [
        (s.start_ns, s.end_ns, s.share, None if s.span is None else s.span)
        for s in timeline.critical_path().segments
    ]


def test_a_hidden_collective_is_not_on_the_path():
    timeline = resolved(
        (launch(0, 2), None),
        (compute(2, 10), 0),
        (compute(10, 30), 1),
        (send(10, 20, ready_ns=10, latency_ns=3, wire_ns=7), 1),
    )
    assert path(timeline) == [
        (0, 2, "launch", 0),
        (2, 10, "compute", 1),
        (10, 30, "compute", 2),
    ]


def test_an_exposed_collective_is_latency_then_wire():
    timeline = resolved(
        (compute(0, 10), None),
        (send(10, 30, ready_ns=10, latency_ns=5, wire_ns=15), 0),
        (compute(30, 40), 1),
    )
    assert path(timeline) == [
        (0, 10, "compute", 0),
        (10, 15, "latency", 1),
        (15, 30, "wire", 1),
        (30, 40, "compute", 2),
    ]
    assert timeline.critical_path().shares == {
        "compute": 0.5,
        "wire": 0.375,
        "latency": 0.125,
        "launch": 0.0,
        "idle": 0.0,
    }


def test_the_path_goes_on_with_the_rank_that_arrived_last():
    ready = {"ready_ns": 50, "latency_ns": 4, "wire_ns": 6}
    timeline = resolved(
        (compute(0, 10), None),
        (compute(0, 50, rank=1), None),
        (send(10, 60, **ready), 1),
        (send(50, 60, rank=1, **ready), 1),
        num_ranks=2,
    )
    assert path(timeline) == [
        (0, 50, "compute", 1),
        (50, 54, "latency", 2),
        (54, 60, "wire", 2),
    ]


def test_a_wait_of_the_cpu_is_passed_through_to_what_it_waited_for():
    timeline = resolved(
        (launch(0, 2), None),
        (compute(2, 20), 0),
        (host(2, 20), 1),
        (launch(20, 23), 2),
        (compute(23, 30), 3),
    )
    assert path(timeline) == [
        (0, 2, "launch", 0),
        (2, 20, "compute", 1),
        (20, 23, "launch", 3),
        (23, 30, "compute", 4),
    ]


def test_a_wait_for_what_was_over_goes_on_with_the_cpu():
    timeline = resolved(
        (launch(0, 8), None),
        (compute(8, 10), 0),
        (launch(8, 16), 0),
        (host(16, 16), 1),
        (launch(16, 24), 3),
    )
    assert path(timeline) == [
        (0, 8, "launch", 0),
        (8, 16, "launch", 2),
        (16, 24, "launch", 4),
    ]


def test_host_work_is_launch_and_copies_are_wire():
    timeline = resolved(
        (host(0, 4, name="load batch"), None),
        (Span(0, "copy", "memcpy", "copy", 4, 9), 0),
        (Span(0, "default", "memset", "memset", 9, 10), 1),
    )
    assert path(timeline) == [
        (0, 4, "launch", 0),
        (4, 9, "wire", 1),
        (9, 10, "compute", 2),
    ]


def test_a_gap_on_the_chain_is_idle():
    timeline = resolved((compute(0, 10), None), (compute(15, 20), 0))
    assert path(timeline)[1] == (10, 15, "idle", None)


def test_without_causes_the_span_that_ended_last_before_is_the_predecessor():
    timeline = Timeline.of(
        [
            launch(0, 2),
            compute(2, 10),
            send(10, 30),
            compute(10, 14),
            compute(33, 40),
        ]
    )
    assert path(timeline) == [
        (0, 2, "launch", 0),
        (2, 10, "compute", 1),
        (10, 30, "wire", 2),
        (30, 33, "idle", None),
        (33, 40, "compute", 4),
    ]


def test_without_causes_a_collective_waits_for_the_rank_that_started_it_last():
    timeline = Timeline.of(
        [
            compute(0, 10),
            send(10, 60),
            compute(0, 48, rank=1),
            send(50, 60, rank=1),
        ]
    )
    assert path(timeline) == [
        (0, 48, "compute", 1),
        (48, 50, "idle", None),
        (50, 60, "wire", 2),
    ]


def test_without_causes_a_kernel_follows_its_own_lane_among_equals():
    timeline = Timeline.of([launch(5, 10), compute(0, 10), compute(10, 20)])
    assert path(timeline) == [(0, 10, "compute", 0), (10, 20, "compute", 2)]


def test_causes_in_a_circle_end_as_idle_time():
    timeline = resolved((compute(0, 10), 1), (compute(20, 30), 0))
    assert path(timeline) == [
        (0, 10, "compute", 0),
        (10, 20, "idle", None),
        (20, 30, "compute", 1),
    ]


def test_an_empty_timeline_has_an_empty_path():
    path = Timeline(()).critical_path()
    assert path.segments == ()
    assert set(path.shares.values()) == {0.0}


@given(random_timelines())
def test_segments_tile_the_run_and_shares_make_up_all_of_it(timeline):
    path = timeline.critical_path()
    edges = [timeline.start_ns]
    for segment in path.segments:
        assert segment.start_ns == edges[-1] < segment.end_ns
        assert (segment.span is None) == (segment.share == "idle")
        edges.append(segment.end_ns)
    assert edges[-1] == timeline.end_ns
    assert sum(path.shares_ns.values()) == path.length_ns
    assert tuple(path.shares_ns) == SHARES


@given(random_timelines())
def test_a_segment_lies_within_its_span(timeline):
    for segment in timeline.critical_path().segments:
        if segment.span is not None:
            span = timeline.spans[segment.span]
            assert span.start_ns <= segment.start_ns < segment.end_ns <= span.end_ns
