"""The event mode's arithmetic: from times on streams to spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlaplab.profiling.marks import Hold, Message, Stretch, spans_of
from overlaplab.timeline import Timeline


def order(stretches=(), holds=(), messages=()):
    return Timeline.of(spans_of(0, stretches, holds, messages)).order()


def test_a_stream_computes_from_step_end_to_step_end():
    steps = [Stretch("default", "", 0, 50, 2), Stretch("default", "", 50, 80, 3)]

    timeline = Timeline.of(spans_of(0, steps, (), ()))

    assert timeline.order() == "0 default step 0-50\n0 default step 50-80"
    assert timeline.steps == (2, 3)


def test_a_wait_for_another_stream_is_a_gap():
    assert order([Stretch("default", "", 0, 100)], [Hold("default", 60, 90)]) == (
        "0 default step 0-60\n0 default step 90-100"
    )


def test_a_hold_is_of_its_own_stream_alone():
    assert order([Stretch("default", "", 0, 100)], [Hold("stream 7", 60, 90)]) == (
        "0 default step 0-100"
    )


def test_the_innermost_label_names_each_piece():
    stretches = [
        Stretch("default", "", 0, 100),
        Stretch("default", "forward", 10, 60),
        Stretch("default", "attention", 20, 30),
    ]

    assert order(stretches) == "\n".join(
        [
            "0 default step 0-10",
            "0 default forward 10-20",
            "0 default attention 20-30",
            "0 default forward 30-60",
            "0 default step 60-100",
        ]
    )


def test_a_collective_starts_when_its_inputs_are_ready_and_the_one_before_has_ended():
    messages = [
        Message("comm", "all_reduce", 10, 40),
        Message("comm", "all_reduce", 20, 70),
        Message("comm", "all_reduce", 90, 95),
        Message("comm:tp", "all_gather", 20, 30),
    ]

    assert order(messages=messages) == "\n".join(
        [
            "0 comm all_reduce 10-40",
            "0 comm:tp all_gather 20-30",
            "0 comm all_reduce 40-70",
            "0 comm all_reduce 90-95",
        ]
    )


def test_communication_is_exposed_where_the_stream_waits_for_it_and_only_there():
    report = Timeline.of(
        spans_of(
            0,
            [Stretch("default", "", 0, 100)],
            [Hold("default", 70, 90)],
            [Message("comm", "all_reduce", 40, 90)],
        )
    ).report()

    assert (report.hidden_ns, report.exposed_ns, report.step_ns) == (30, 20, 100)


times = st.integers(0, 300)
ranges = st.tuples(times, times).map(sorted)
holds = st.lists(ranges.map(lambda r: Hold("default", *r)), max_size=4)
messages = st.lists(ranges.map(lambda r: Message("comm", "all_reduce", *r)), max_size=5)
inner = st.lists(ranges.map(lambda r: Stretch("default", "x", *r)), max_size=4)


@given(inner, holds, messages)
def test_no_time_is_counted_twice_on_a_stream_and_none_is_lost(inner, holds, messages):
    step = Stretch("default", "", 0, 300)
    spans = spans_of(0, [step, *inner], holds, messages)
    held = {t for h in holds for t in range(h.start_ns, h.end_ns)}

    for lane in ("default", "comm"):
        seen = [t for s in spans if s.lane == lane for t in range(s.start_ns, s.end_ns)]
        assert len(seen) == len(set(seen))
        if lane == "default":
            assert set(seen) == set(range(300)) - held


@given(messages)
def test_a_collective_lies_between_its_inputs_and_its_end(messages):
    for span, message in zip(spans_of(0, (), (), messages), messages, strict=True):
        assert message.ready_ns <= span.start_ns <= span.end_ns == message.end_ns
