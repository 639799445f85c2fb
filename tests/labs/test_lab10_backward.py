"""10.5: gradients that are late, overwritten, kept or not the mean are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab10 as lab
from overlaplab_course.lab10 import step_checks as checks


def step(
    grad,
    units,
    weights,
    *,
    buffers=2,
    wait_before=True,
    wait_end=True,
    divide=True,
    at_once=False,
):
    """What the exercise asks for, with a knob for each mistake."""
    rows, works = lab.new_slots(units, buffers), [None] * buffers
    for i, unit in enumerate(units):
        full = rows[i % buffers][: unit.numel]
        slot = next(weights)
        if works[i % buffers] is not None and wait_before:
            works[i % buffers].wait()
        grad = unit.backward(grad, slot, full)
        del slot
        works[i % buffers] = lab.reduce_scatter(unit.grad, full, async_op=True)
        if at_once:
            works[i % buffers].wait()
    for work in works:
        if work is not None and wait_end:
            work.wait()
    for unit in units:
        if divide:
            unit.grad /= dist.get_world_size()


def one_buffer(grad, units, weights):
    step(grad, units, weights, buffers=1)


def three_buffers(grad, units, weights):
    step(grad, units, weights, buffers=3)


def a_buffer_for_each(grad, units, weights):
    step(grad, units, weights, buffers=len(units) + 1)


def overwrites_what_is_sent(grad, units, weights):
    step(grad, units, weights, wait_before=False)


def waits_only_at_the_end(grad, units, weights):
    """Buffers are written while they are sent; a prefetcher of depth 1 hides it.

    The gather behind each message is waited for soon after, and with it the message.
    """
    rows, works = lab.new_slots(units, 2), []
    for i, unit in enumerate(units):
        slot, full = next(weights), rows[i % 2][: unit.numel]
        grad = unit.backward(grad, slot, full)
        del slot
        works.append(lab.reduce_scatter(unit.grad, full, async_op=True))
    for unit, work in zip(units, works, strict=True):
        work.wait()
        unit.grad /= dist.get_world_size()


def never_waits_for_the_last(grad, units, weights):
    step(grad, units, weights, wait_end=False)


def the_sum(grad, units, weights):
    step(grad, units, weights, divide=False)


def half_of_the_sum(grad, units, weights):
    step(grad, units, weights, divide=False)
    for unit in units:
        unit.grad /= 2


def waits_at_once(grad, units, weights):
    step(grad, units, weights, at_once=True)


def in_line(grad, units, weights):
    (row,) = lab.new_slots(units, 1)
    for unit in units:
        slot = next(weights)
        grad = unit.backward(grad, slot, row[: unit.numel])
        del slot
        lab.reduce_scatter(unit.grad, row[: unit.numel])
        unit.grad /= dist.get_world_size()


def everything_after_the_backward(grad, units, weights):
    """As a sharded optimizer of the documents: all gradients whole, then sent."""
    rows = [unit.shard.new_empty(unit.numel) for unit in units]
    for unit, row in zip(units, rows, strict=True):
        slot = next(weights)
        grad = unit.backward(grad, slot, row)
        del slot
    for unit, row in zip(units, rows, strict=True):
        lab.reduce_scatter(unit.grad, row)
        unit.grad /= dist.get_world_size()


def all_reduces(grad, units, weights):
    """Right gradients, twice the bytes."""
    rows, sent = lab.new_slots(units, 2), [None, None]

    def take(turn):
        if sent[turn] is not None:
            unit, full, work = sent[turn]
            work.wait()
            parts = full.view(dist.get_world_size(), -1)
            torch.div(parts[dist.get_rank()], dist.get_world_size(), out=unit.grad)

    for i, unit in enumerate(units):
        turn, full = i % 2, rows[i % 2][: unit.numel]
        slot = next(weights)
        take(turn)
        grad = unit.backward(grad, slot, full)
        del slot
        sent[turn] = unit, full, dist.all_reduce(full, async_op=True)
    take(0)
    take(1)


def keeps_its_own_part(grad, units, weights):
    """Never sends: this rank's gradient in the place of the mean."""
    (row,) = lab.new_slots(units, 1)
    for unit in units:
        slot = next(weights)
        grad = unit.backward(grad, slot, row[: unit.numel])
        del slot
        parts = row[: unit.numel].view(dist.get_world_size(), -1)
        unit.grad.copy_(parts[dist.get_rank()])


def the_cpu_waits(grad, units, weights):
    rows, works = lab.new_slots(units, 2), [None, None]
    for i, unit in enumerate(units):
        slot, full = next(weights), rows[i % 2][: unit.numel]
        if works[i % 2] is not None:
            while not works[i % 2].is_completed():
                pass
            works[i % 2].wait()
        grad = unit.backward(grad, slot, full)
        del slot
        works[i % 2] = lab.reduce_scatter(unit.grad, full, async_op=True)
    for work in works:
        if work is not None:
            work.wait()
    for unit in units:
        unit.grad /= dist.get_world_size()


def divides_before_it_has_arrived(grad, units, weights):
    rows, works = lab.new_slots(units, 2), [None, None]
    for i, unit in enumerate(units):
        slot, full = next(weights), rows[i % 2][: unit.numel]
        if works[i % 2] is not None:
            works[i % 2].wait()
        grad = unit.backward(grad, slot, full)
        del slot
        works[i % 2] = lab.reduce_scatter(unit.grad, full, async_op=True)
        unit.grad /= dist.get_world_size()
    for work in works:
        if work is not None:
            work.wait()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (one_buffer, checks.GOES_ON),
        (waits_at_once, checks.GOES_ON),
        (in_line, checks.GOES_ON),
        (three_buffers, checks.BUFFERS),
        (a_buffer_for_each, checks.BUFFERS),
        (everything_after_the_backward, checks.BUFFERS),
        (overwrites_what_is_sent, checks.SENT_SAFE),
        (waits_only_at_the_end, checks.SENT_SAFE),
        (never_waits_for_the_last, checks.SENT_SAFE),
        (divides_before_it_has_arrived, checks.SENT_SAFE),
        (the_sum, checks.MEANS),
        (half_of_the_sum, checks.MEANS),
        (all_reduces, checks.SENT_ONCE),
        (keeps_its_own_part, checks.SENT_ONCE),
        (the_cpu_waits, checks.CPU),
    ],
)
def test_a_wrong_backward_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("10.5"), wrong)
    assert sentence in faults(verdict), str(verdict)
    assert verdict.timeline is not None


def test_the_sum_is_called_the_sum():
    assert "SUM over the ranks" in judge(find_exercise("10.5"), the_sum).hint


# -- unusual and right


def two_in_turn(grad, units, weights):
    step(grad, units, weights)


def averaged_on_the_way(grad, units, weights):
    """The first gradient is divided; so are all that follow from it."""
    step(grad / dist.get_world_size(), units, weights, divide=False)


def a_new_row_for_each(grad, units, weights):
    """The allocator's blocks come round: at most two rows live."""
    in_flight = []
    for unit in units:
        slot = next(weights)
        if len(in_flight) == 2:
            done, work, row = in_flight.pop(0)
            work.wait()
            done.grad /= dist.get_world_size()
            del work, row
        row = unit.shard.new_empty(unit.numel)
        grad = unit.backward(grad, slot, row)
        del slot
        work = lab.reduce_scatter(unit.grad, row, async_op=True)
        in_flight.append((unit, work, row))
        del work, row
    for done, work, _ in in_flight:
        work.wait()
        done.grad /= dist.get_world_size()


def sent_from_a_stream_of_its_own(grad, units, weights):
    rows, side = lab.new_slots(units, 2), streams.Stream()
    left = [None, None]
    for i, unit in enumerate(units):
        slot, full = next(weights), rows[i % 2][: unit.numel]
        if left[i % 2] is not None:
            streams.current_stream().wait_event(left[i % 2])
        grad = unit.backward(grad, slot, full)
        del slot
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            lab.reduce_scatter(unit.grad, full, async_op=True).wait()
            unit.grad.div_(dist.get_world_size())
            left[i % 2] = side.record_event()
    streams.current_stream().wait_stream(side)


def means_at_the_end_by_foreach(grad, units, weights):
    step(grad, units, weights, divide=False)
    torch._foreach_div_([unit.grad for unit in units], dist.get_world_size())


@pytest.mark.parametrize(
    "right",
    [
        two_in_turn,
        averaged_on_the_way,
        a_new_row_for_each,
        sent_from_a_stream_of_its_own,
        means_at_the_end_by_foreach,
    ],
)
def test_an_unusual_backward_passes(right):
    verdict = judge(find_exercise("10.5"), right)
    assert verdict.passed, str(verdict)
