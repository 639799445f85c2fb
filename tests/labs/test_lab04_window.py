"""4.4: a limit that stalls, leaks or races is refused; pools and events pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab04 import checks, given, reference


class Window:
    """What the exercise gives: a list in flight, `send` and `finish_oldest`."""

    def __init__(self):
        self.in_flight = []

    def send(self, grad):
        message = grad.float()
        work = dist.all_reduce(message, async_op=True)
        self.in_flight.append((grad, message, work))

    def finish_oldest(self):
        grad, message, work = self.in_flight.pop(0)
        work.wait()
        grad.copy_(message / dist.get_world_size())


def stalls_the_backward_pass(layers, k):
    """Errata: the *compute* stream waits for the oldest message."""
    window, grads = Window(), []
    for layer in layers:
        grads.append(given.backward(layer))
        if len(window.in_flight) == k:
            window.finish_oldest()
        window.send(grads[-1])
    while window.in_flight:
        window.finish_oldest()
    return grads


def one_at_a_time(layers, k):
    window, grads = Window(), []
    for layer in layers:
        grads.append(given.backward(layer))
        window.send(grads[-1])
        window.finish_oldest()
    return grads


def without_a_limit(layers, k):
    window, grads = Window(), []
    for layer in layers:
        grads.append(given.backward(layer))
        window.send(grads[-1])
    while window.in_flight:
        window.finish_oldest()
    return grads


def on_the_side(layers, k, *, room=0, first_wait=True, last_wait=True, keep=None):
    window, grads = Window(), []
    compute, side = streams.current_stream(), streams.Stream()
    for layer in layers:
        grads.append(given.backward(layer))
        if first_wait:
            side.wait_stream(compute)
        with streams.stream(side):
            if len(window.in_flight) == k + room:
                window.finish_oldest()
            window.send(grads[-1])
            if keep is not None:
                keep.append(window.in_flight[-1][1])
    with streams.stream(side):
        while window.in_flight:
            window.finish_oldest()
    if last_wait:
        compute.wait_stream(side)
    return grads


def one_too_many(layers, k):
    """Makes room after it has sent."""
    return on_the_side(layers, k, room=1)


def never_more_than_two(layers, k):
    return on_the_side(layers, min(k, 2))


def always_two(layers, k):
    return on_the_side(layers, 2)


def copies_before_the_gradient_is_there(layers, k):
    return on_the_side(layers, k, first_wait=False)


def hands_over_what_is_not_written_back(layers, k):
    """Right values on the virtual cluster; nothing orders the caller's next kernel."""
    grads = on_the_side(layers, k, last_wait=False)
    return [grad.clone() for grad in grads]


def leaves_the_caller_unordered(layers, k):
    """Drained under the side stream, which the caller's stream never waits for."""
    return on_the_side(layers, k, last_wait=False)


def keeps_a_list_of_messages(layers, k):
    kept = []
    grads = on_the_side(layers, k, keep=kept)
    return grads if kept else []


def forgets_the_mean(layers, k):
    return [grad * dist.get_world_size() for grad in on_the_side(layers, k)]


def takes_half_for_the_mean(layers, k):
    """Where two ranks meet it is."""
    grads = on_the_side(layers, k)
    return grads if dist.get_world_size() == 2 else [grad * 1.5 for grad in grads]


def goes_on_working(layers, k):
    grads = on_the_side(layers, k)
    torch.ones(400, 400) @ torch.ones(400, 400)
    return grads


def the_cpu_waits(layers, k):
    window, grads = Window(), []
    for layer in layers:
        grads.append(given.backward(layer))
        if len(window.in_flight) == k:
            while not window.in_flight[0][2].is_completed():
                pass
            window.finish_oldest()
        window.send(grads[-1])
    while window.in_flight:
        window.finish_oldest()
    return grads


def leaves_the_last_messages(layers, k):
    window, grads = Window(), []
    compute, side = streams.current_stream(), streams.Stream()
    for layer in layers:
        grads.append(given.backward(layer))
        side.wait_stream(compute)
        with streams.stream(side):
            if len(window.in_flight) == k:
                window.finish_oldest()
            window.send(grads[-1])
    compute.wait_stream(side)
    return grads


def only_finishes_on_the_side(layers, k, *, record=False):
    """Allocated on one stream, released under another that still reads it."""
    window, grads = Window(), []
    compute, side = streams.current_stream(), streams.Stream()

    def finish_oldest():
        message = window.in_flight[0][1]
        window.finish_oldest()
        if record:
            message.record_stream(side)

    for layer in layers:
        grads.append(given.backward(layer))
        if len(window.in_flight) == k:
            with streams.stream(side):
                finish_oldest()
        window.send(grads[-1])
    with streams.stream(side):
        while window.in_flight:
            finish_oldest()
    compute.wait_stream(side)
    return grads


def puts_the_release_off(layers, k):
    """record_stream is safe, and lets the allocator make new memory meanwhile."""
    return only_finishes_on_the_side(layers, k, record=True)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (only_finishes_on_the_side, checks.SAFE),
        (puts_the_release_off, checks.MEMORY),
        (stalls_the_backward_pass, checks.FREE),
        (one_at_a_time, checks.FREE),
        (without_a_limit, checks.MEMORY),
        (one_too_many, checks.MEMORY),
        (always_two, checks.MEMORY),
        (keeps_a_list_of_messages, checks.MEMORY),
        (copies_before_the_gradient_is_there, checks.SAFE),
        (hands_over_what_is_not_written_back, checks.SAFE),
        (leaves_the_caller_unordered, checks.SAFE),
        (leaves_the_last_messages, checks.SAFE),
        (forgets_the_mean, checks.MEANS),
        (takes_half_for_the_mean, checks.MEANS),
        (goes_on_working, checks.WINDOW_STEP),
        (the_cpu_waits, checks.FREE),
    ],
)
def test_a_wrong_window_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("4.4"), wrong)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)
    assert verdict.timeline is not None


def test_who_stalls_is_asked_for_the_current_stream():
    hint = judge(find_exercise("4.4"), stalls_the_backward_pass).hint
    assert hint == "which stream is current where you call wait()?"


def test_who_lets_the_cpu_wait_learns_so():
    assert "the CPU waits" in judge(find_exercise("4.4"), the_cpu_waits).hint


def test_the_step_of_a_smaller_window_is_not_refused_where_it_is_as_short():
    assert judge(find_exercise("4.4"), never_more_than_two).passed


def a_pool_of_buffers(layers, k):
    """k buffers for good; a place is free when its mean is written back."""
    compute, side = streams.current_stream(), streams.Stream()
    with streams.stream(side):
        pool = torch.empty(k, *given.SHAPE)
    grads, works = [], [None] * k
    owner = [None] * k

    def take_back(place):
        if works[place] is not None:
            works[place].wait()
            owner[place].copy_(pool[place] / dist.get_world_size())

    for number, layer in enumerate(layers):
        grads.append(given.backward(layer))
        side.wait_stream(compute)
        place = number % k
        with streams.stream(side):
            take_back(place)
            owner[place] = grads[-1]
            pool[place].copy_(grads[-1])
            works[place] = dist.all_reduce(pool[place], async_op=True)
    with streams.stream(side):
        for place in range(k):
            take_back(place)
    compute.wait_stream(side)
    return grads


def an_event_for_each_gradient(layers, k):
    """All of the backward pass is launched first; then the messages, one by one."""
    compute, side = streams.current_stream(), streams.Stream()
    window, grads, there = Window(), [], []
    for layer in layers:
        grads.append(given.backward(layer))
        there.append(compute.record_event())
    with streams.stream(side):
        for grad, event in zip(grads, there, strict=True):
            side.wait_event(event)
            if len(window.in_flight) == k:
                window.finish_oldest()
            window.send(grad)
        while window.in_flight:
            window.finish_oldest()
    compute.wait_stream(side)
    return grads


def the_cpu_waits_when_all_is_launched(layers, k):
    """A host that blocks harms nobody once the backward pass is in its queue."""
    compute, side = streams.current_stream(), streams.Stream()
    window, grads, there = Window(), [], []
    for layer in layers:
        grads.append(given.backward(layer))
        there.append(compute.record_event())
    with streams.stream(side):
        for grad, event in zip(grads, there, strict=True):
            side.wait_event(event)
            if len(window.in_flight) == k:
                while not window.in_flight[0][2].is_completed():
                    pass
                window.finish_oldest()
            window.send(grad)
        while window.in_flight:
            window.finish_oldest()
    compute.wait_stream(side)
    return grads


def divided_first(layers, k):
    """The mean as a sum of parts."""
    compute, side = streams.current_stream(), streams.Stream()
    grads, in_flight = [], []

    def finish_oldest():
        grad, message, work = in_flight.pop(0)
        work.wait()
        grad.copy_(message)

    def send(grad):
        message = grad.float().div_(dist.get_world_size())
        work = dist.all_reduce(message, async_op=True)
        in_flight.append((grad, message, work))

    for layer in layers:
        grads.append(given.backward(layer))
        with streams.stream(side):
            if len(in_flight) == k:
                finish_oldest()
        side.wait_stream(compute)
        with streams.stream(side):
            send(grads[-1])
    with streams.stream(side):
        while in_flight:
            finish_oldest()
    compute.wait_stream(side)
    return grads


@pytest.mark.parametrize(
    "right",
    [
        a_pool_of_buffers,
        an_event_for_each_gradient,
        the_cpu_waits_when_all_is_launched,
        divided_first,
    ],
)
def test_an_unusual_window_passes(right):
    verdict = judge(find_exercise("4.4"), right)
    assert verdict.passed, str(verdict)


def test_a_limit_of_one_costs_the_reference_less_than_three_percent():
    free = given.play_window(reference.average_gradients, 10).timeline.step_ns
    for k in (1, 2):
        limited = given.play_window(reference.average_gradients, k)
        assert limited.program is not None
        assert given.messages_alive(limited.program) == k
        assert limited.timeline.step_ns < 1.03 * free
