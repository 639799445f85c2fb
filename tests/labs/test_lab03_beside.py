"""3.1a: three lines with one event; what the streams did is judged, not the code."""

from __future__ import annotations

import pytest

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab03 import checks

SAFE, ALL_RUN, FREE_CPU, SHORT = checks.LAB.sentences("3.1a")


def beside(
    mark=lambda compute, wire: compute.record_event(),
    wait=lambda wire, event, compute: wire.wait_event(event),
    end=lambda compute, wire: compute.wait_stream(wire),
):
    """The lesson's function with other lines in the three places."""

    def send_beside(first, second, message):
        compute, wire = streams.current_stream(), streams.Stream()
        wire.wait_stream(compute)
        first.run()
        event = mark(compute, wire)
        second.run()
        wait(wire, event, compute)
        with streams.stream(wire):
            message.run()
        end(compute, wire)

    return send_beside


def nothing(*_):
    pass


def marked_behind_second(first, second, message):
    compute, wire = streams.current_stream(), streams.Stream()
    wire.wait_stream(compute)
    first.run()
    second.run()
    ended = compute.record_event()
    wire.wait_event(ended)
    with streams.stream(wire):
        message.run()
    compute.wait_stream(wire)


def on_one_stream(first, second, message):
    for task in (first, second, message):
        task.run()


def message_twice(first, second, message):
    beside()(first, second, message)
    message.run()


WRONG = {
    "no wait": (beside(wait=nothing), SAFE, "message"),
    "a mark of the wrong stream": (
        beside(mark=lambda compute, wire: wire.record_event()),
        SAFE,
        "message",
    ),
    "no end": (beside(end=nothing), SAFE, "collect"),
    "the message twice": (message_twice, ALL_RUN, "ran 'message' 2 times"),
    "no message": (
        lambda first, second, message: [first.run(), second.run()],
        ALL_RUN,
        "the result of message is wrong",
    ),
    "the CPU waits": (
        beside(wait=lambda wire, event, compute: event.synchronize()),
        FREE_CPU,
        "the CPU waits in event.synchronize",
    ),
    "waits for the whole stream": (
        beside(wait=lambda wire, event, compute: wire.wait_stream(compute)),
        SHORT,
        "the step took 11.0 ms",
    ),
    "marked behind second": (marked_behind_second, SHORT, "the step took 11.0 ms"),
    "one stream": (on_one_stream, SHORT, "as on one stream"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_refused_for_its_own_reason(name, faults):
    solution, sentence, reason = WRONG[name]
    found = faults(judge(find_exercise("3.1a"), solution))
    assert reason in found[sentence]


def behind_the_message_at_once(first, second, message):
    """Launches the message before `second`: there its stream may wait for all."""
    compute, wire = streams.current_stream(), streams.Stream()
    first.run()
    wire.wait_stream(compute)
    with streams.stream(wire):
        message.run()
    second.run()
    compute.wait_stream(wire)


def second_aside(first, second, message):
    """The message stays on the caller's stream, and `second` leaves it."""
    compute, side = streams.current_stream(), streams.Stream()
    side.wait_stream(compute)
    first.run()
    event = streams.Event()
    event.record()
    with streams.stream(side):
        event.wait()  # no sooner: kernels that run side by side share the GPU
        second.run()
    message.run()
    compute.wait_event(side.record_event())


@pytest.mark.parametrize(
    "right",
    [beside(), behind_the_message_at_once, second_aside],
    ids=lambda f: f.__name__,
)
def test_a_right_one_passes_however_it_is_written(right):
    verdict = judge(find_exercise("3.1a"), right)
    assert verdict.passed, str(verdict)
