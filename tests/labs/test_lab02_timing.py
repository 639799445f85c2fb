"""2.1: a stopwatch that falls into one trap is refused by that trap's sentence."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
import torch

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab02 import checks, given, show
from overlaplab_course.lab02.stopwatch import clock, run_timed


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first run of a process imports for long: not on an exercise's deadline."""
    show.true_ms("steady")


def time_with_events(
    step,
    *,
    warm_up=3,
    number=20,
    typical=statistics.median,
    wait_inside=False,
    enable_timing=True,
    wait_at_the_end=True,
    per_ms=1,
):
    for _ in range(warm_up):
        step()
    events = [streams.Event(enable_timing=enable_timing) for _ in range(number + 1)]
    for event in events[:-1]:
        event.record()
        step()
        if wait_inside:
            streams.synchronize()
    events[-1].record()
    if wait_at_the_end:
        streams.synchronize()
    return per_ms * typical([a.elapsed_time(b) for a, b in pairwise(events)])


def pairs_of_events(step):
    """Unusual: two events a step; waits for the last one only."""
    for _ in range(5):
        step()
    pairs = []
    for _ in range(12):
        begin, end = (streams.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        pairs.append((begin, end))
    pairs[-1][1].synchronize()
    times = torch.tensor([begin.elapsed_time(end) for begin, end in pairs])
    return times.quantile(0.5).item()


def from_the_first(step):
    """Unusual: all times since one event, on the stream's own methods."""
    stream = streams.current_stream()
    for _ in range(3):
        step()
    streams.synchronize()
    zero = streams.Event(enable_timing=True)
    stream.record_event(zero)
    ends = []
    for _ in range(25):
        step()
        ends.append(stream.record_event(streams.Event(enable_timing=True)))
    stream.synchronize()
    at = [0.0, *(zero.elapsed_time(end) for end in ends)]
    steps = sorted(b - a for a, b in pairwise(at))
    return steps[len(steps) // 2]


def one_clock_around(step):
    start = clock()
    for _ in range(20):
        step()
    return (clock() - start) / 20


def clock_and_waits(step):
    for _ in range(3):
        step()
    times = []
    for _ in range(20):
        streams.synchronize()
        start = clock()
        step()
        streams.synchronize()
        times.append(clock() - start)
    return statistics.median(times)


def mean_between_two_waits(step):
    for _ in range(3):
        step()
    streams.synchronize()
    start = clock()
    for _ in range(20):
        step()
    streams.synchronize()
    return (clock() - start) / 20


def on_another_stream(step):
    for _ in range(3):
        step()
    side = streams.Stream()
    events = [streams.Event(enable_timing=True) for _ in range(21)]
    for event in events[:-1]:
        event.record(side)
        step()
    events[-1].record(side)
    streams.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def with_slips(**slips):
    return lambda step: time_with_events(step, **slips)


@pytest.mark.parametrize(
    "right",
    [time_with_events, pairs_of_events, from_the_first],
    ids=lambda f: f.__name__,
)
def test_any_stopwatch_of_the_typical_step_passes(right):
    verdict = judge(find_exercise("2.1"), lambda step: right(step))
    assert verdict.passed, str(verdict)


WRONG = {
    "a clock around launches": (one_clock_around, checks.GPU_TIME),
    "events on a stream without work": (on_another_stream, checks.GPU_TIME),
    "in seconds": (with_slips(per_ms=1e-3), checks.GPU_TIME),
    "no warm-up, mean": (
        with_slips(warm_up=0, typical=statistics.mean),
        checks.WARM_UP,
    ),
    "the first step alone": (
        with_slips(warm_up=0, typical=lambda times: times[0]),
        checks.WARM_UP,
    ),
    "waits in each step, by the clock": (clock_and_waits, checks.AHEAD),
    "waits in each step, by events": (with_slips(wait_inside=True), checks.AHEAD),
    "a mean over odd steps": (mean_between_two_waits, checks.TYPICAL),
    "a mean of events": (with_slips(typical=statistics.mean), checks.TYPICAL),
    "the fastest step": (with_slips(typical=min), checks.TYPICAL),
    "four steps": (with_slips(number=4), checks.GPU_TIME),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_trap_is_refused_by_its_sentence(name, faults):
    stopwatch, sentence = WRONG[name]
    verdict = judge(find_exercise("2.1"), stopwatch)
    assert list(faults(verdict)) == [sentence]
    assert verdict.timeline is not None
    assert verdict.hint


@pytest.mark.parametrize(
    ("slips", "words"),
    [
        ({"enable_timing": False}, "Event(enable_timing=True)"),
        ({"wait_at_the_end": False}, "has not happened yet"),
    ],
)
def test_events_complain_as_those_of_cuda(slips, words):
    verdict = judge(find_exercise("2.1"), with_slips(**slips))
    assert not verdict.passed
    assert words in str(verdict)


def test_what_is_no_number_is_described():
    verdict = judge(find_exercise("2.1"), lambda step: "fast")
    assert "expected a number, in ms" in str(verdict)


def test_seconds_are_described_as_seconds(faults):
    found = faults(judge(find_exercise("2.1"), with_slips(per_ms=1e-3)))
    assert "that is in seconds" in found[checks.GPU_TIME]


def test_an_event_has_the_time_at_which_its_stream_gets_there():
    def program():
        a = torch.eye(64)
        begin, end = (streams.Event(enable_timing=True) for _ in range(2))
        a @ a
        begin.record()
        for _ in range(3):
            a @ a
        end.record()
        launched_ms = clock()
        streams.synchronize()
        return begin.elapsed_time(end), launched_ms, clock()

    timed = run_timed(program, world_size=1)
    gpu_ms, launched_ms, finished_ms = timed.value
    products = [s for s in timed.timeline.spans if s.name == "mm"]
    assert gpu_ms == pytest.approx((products[-1].end_ns - products[0].end_ns) / 1e6)
    assert launched_ms == pytest.approx(0.05)  # five launches of 10 us, eye among them
    assert finished_ms == products[-1].end_ns / 1e6


def test_a_program_whose_launches_hang_on_its_clock_settles():
    def program():
        a, times = torch.eye(256), 0
        start = clock()
        while clock() - start < 0.1:
            a @ a
            times += 1
        return times

    assert run_timed(program, world_size=1).value == 10


def test_the_clock_explains_itself_outside_of_a_run():
    with pytest.raises(RuntimeError, match=r"inside a function that the lab runs"):
        clock()


@pytest.mark.parametrize("kind", ["steady", "cold", "odd"])
def test_steps_differ_in_their_trap_alone(kind):
    assert show.true_ms(kind) == pytest.approx(show.true_ms("steady"))


def test_the_two_stopwatches_of_the_lesson_are_wrong_on_either_side():
    true_ms = show.true_ms("small first")
    around = given.time_with(one_clock_around, "small first").value[0]
    waiting = given.time_with(clock_and_waits, "small first").value[0]
    assert around < 0.8 * true_ms < 1.2 * true_ms < waiting
