"""4.6 and 4.7: schedules that lose or repeat a part, and bandwidths of other things."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab04 import checks_extra, extras, show


def hands_on(rank, step, num_ranks):
    return (rank - step) % num_ranks


def the_wrong_way_round(rank, step, num_ranks):
    return (rank + step) % num_ranks


def always_its_own(rank, step, num_ranks):
    return rank


def always_the_first(rank, step, num_ranks):
    return 0


def all_send_the_chunk_of_the_step(rank, step, num_ranks):
    return step % num_ranks


def begins_the_second_half_anew(rank, step, num_ranks):
    """Sends what it held at the start, not what it has finished."""
    return (rank - step % (num_ranks - 1)) % num_ranks


def without_end(rank, step, num_ranks):
    return rank - step


def only_for_four(rank, step, num_ranks):
    return (rank - step) % 4 % num_ranks


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (the_wrong_way_round, checks_extra.HALF),
        (always_its_own, checks_extra.ONCE),
        (always_the_first, checks_extra.ONCE),
        (all_send_the_chunk_of_the_step, checks_extra.HALF),
        (begins_the_second_half_anew, checks_extra.ALL),
        (without_end, checks_extra.CHUNK),
        (only_for_four, checks_extra.ONCE),
    ],
)
def test_a_wrong_schedule_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("4.6"), wrong)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)


def test_who_goes_the_wrong_way_round_learns_what_to_send_on(faults):
    verdict = judge(find_exercise("4.6"), the_wrong_way_round)
    assert "after 3 steps" in faults(verdict)[checks_extra.HALF]
    assert verdict.hint == "in step 1 send what you just added to"


def one_further(rank, step, num_ranks):
    return (rank - step + 1) % num_ranks


def two_formulas(rank, step, num_ranks):
    if step < num_ranks - 1:
        return (rank + num_ranks - step) % num_ranks
    return (rank + 1 - (step - num_ranks + 1)) % num_ranks


def counted_out(rank, step, num_ranks):
    chunk = rank
    for _ in range(step):
        chunk = num_ranks - 1 if chunk == 0 else chunk - 1
    return chunk


@pytest.mark.parametrize("right", [hands_on, one_further, two_formulas, counted_out])
def test_an_unusual_schedule_passes(right):
    verdict = judge(find_exercise("4.6"), right)
    assert verdict.passed, str(verdict)


@given(st.integers(2, 12), st.integers(0, 11))
def test_a_ring_ends_with_every_part_once_wherever_it_begins(num_ranks, shift):
    held = extras.simulate(
        lambda r, s, n: (r - s + shift) % n, num_ranks, 2 * num_ranks - 2
    )
    everything = {rank: 1 for rank in range(num_ranks)}
    assert all(chunk == everything for chunks in held for chunk in chunks)


def test_the_text_marks_a_part_that_came_twice():
    assert "!" in show.ring_text(always_the_first)
    assert "!" not in show.ring_text(hands_on)


def not_written(rank, step, num_ranks):
    raise NotImplementedError


def test_a_schedule_that_cannot_be_drawn_says_why():
    assert "not written" in show.ring_text(not_written)
    assert "rank 0 of 4, step 1: -1" in show.ring_text(without_end)


def bus(operation, num_ranks, num_bytes, us):
    part = (num_ranks - 1) / num_ranks
    times = {"all_reduce": 2 * part, "broadcast": 1}.get(operation, part)
    return times * num_bytes / us / 1e3


def size_over_time(operation, num_ranks, num_bytes, us):
    return num_bytes / us / 1e3


def always_an_all_reduce(operation, num_ranks, num_bytes, us):
    return bus("all_reduce", num_ranks, num_bytes, us)


def always_four_ranks(operation, num_ranks, num_bytes, us):
    return bus(operation, 4, num_bytes, us)


def in_megabytes(operation, num_ranks, num_bytes, us):
    return bus(operation, num_ranks, num_bytes, us) * 1e3


def in_gibibytes(operation, num_ranks, num_bytes, us):
    return bus(operation, num_ranks, num_bytes, us) * 1e9 / 2**30


def a_broadcast_in_parts(operation, num_ranks, num_bytes, us):
    operation = "all_gather" if operation == "broadcast" else operation
    return bus(operation, num_ranks, num_bytes, us)


def a_shard_for_the_whole(operation, num_ranks, num_bytes, us):
    times = num_ranks if operation == "all_gather" else 1
    return bus(operation, num_ranks, num_bytes, us) * times


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (size_over_time, "that is size over time"),
        (always_an_all_reduce, "which (n - 1)/n"),
        (always_four_ranks, "which"),
        (in_megabytes, "1e9 bytes a second"),
        (in_gibibytes, "which"),
        (a_broadcast_in_parts, "which once"),
        (a_shard_for_the_whole, "which"),
        (lambda *_: None, "return a number"),
    ],
)
def test_a_wrong_bandwidth_is_refused_with_a_hint(wrong, hint):
    verdict = judge(find_exercise("4.7"), wrong)
    assert not verdict.passed
    assert hint in verdict.hint


def from_the_halves(operation, num_ranks, num_bytes, us):
    if operation == "all_reduce":
        halves = ("reduce_scatter", "all_gather")
        return sum(from_the_halves(h, num_ranks, num_bytes, us) for h in halves)
    lost = 0 if operation == "broadcast" else num_bytes / num_ranks
    return (num_bytes - lost) * 1e-9 / (us * 1e-6)


@pytest.mark.parametrize("right", [bus, from_the_halves])
def test_an_unusual_bandwidth_passes(right):
    verdict = judge(find_exercise("4.7"), right)
    assert verdict.passed, str(verdict)
