"""16.7: how long a step takes whose blocks compute again beside messages."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab16 import chains, measured, overlap, overlap_checks


def right(blocks, messages, again):
    now, wire = sum(b.ms for b in blocks), 0
    for i in range(len(blocks) - 1, -1, -1):
        now += blocks[i].ms * (2 + (i in again))
        wire = max(now, wire) + messages[i]
    return max(now, wire)


def of_ends(blocks, messages, again):
    """Each message's earliest arrival, if it were the first to wait; the largest."""
    n, start = len(blocks), sum(b.ms for b in blocks)
    ends = [
        start + sum(blocks[j].ms * (3 if j in again else 2) for j in range(i, n))
        for i in range(n)
    ]
    arrivals = [ends[i] + sum(messages[: i + 1]) for i in range(n)]
    return float(max(arrivals))


def free(blocks, messages, again):
    """As if computing again took no time."""
    return right(blocks, messages, set())


def twice_the_forward(blocks, messages, again):
    """The whole forward once more, whatever is computed again."""
    more = sum(b.ms for b in blocks) if again else 0
    return right(blocks, messages, set()) + more


def sent_before_the_backward(blocks, messages, again):
    now, wire = sum(b.ms for b in blocks), 0
    for i in reversed(range(len(blocks))):
        wire = max(now, wire) + messages[i]
        now += blocks[i].ms * (2 + (i in again))
    return max(now, wire)


def after_it_all(blocks, messages, again):
    return (
        sum(b.ms * 3 for b in blocks) + chains.extra_ms(blocks, again) + sum(messages)
    )


def all_is_hidden(blocks, messages, again):
    return sum(b.ms * 3 for b in blocks) + chains.extra_ms(blocks, again)


def at_the_same_time(blocks, messages, again):
    """No message waits for another."""
    now = sum(b.ms for b in blocks)
    last = 0
    for i in reversed(range(len(blocks))):
        now += blocks[i].ms * (2 + (i in again))
        last = max(last, now + messages[i])
    return max(now, last)


def from_the_first(blocks, messages, again):
    """The backward in the order of the forward."""
    flip = {len(blocks) - 1 - i for i in again}
    return right(blocks[::-1], messages[::-1], flip)


WRONG = {
    free: overlap_checks.ALONE,
    twice_the_forward: overlap_checks.BESIDE,
    sent_before_the_backward: overlap_checks.BESIDE,
    after_it_all: overlap_checks.BESIDE,
    all_is_hidden: overlap_checks.BESIDE,
    from_the_first: overlap_checks.BESIDE,
    at_the_same_time: overlap_checks.LINE,
}


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_step_is_refused_for_its_own_reason(function, faults):
    assert WRONG[function] in faults(judge(find_exercise("16.7"), function))


@pytest.mark.parametrize("function", [right, of_ends])
def test_a_right_step_passes_however_it_is_found(function):
    verdict = judge(find_exercise("16.7"), function)
    assert verdict.passed, str(verdict)


def test_computing_more_again_makes_the_lessons_step_shorter():
    def step_ms(again):
        return overlap.step(overlap.EXAMPLE, overlap.MESSAGES, again).step_ns // 10**6

    least = chains.brute_force(overlap.EXAMPLE, 100)
    short = chains.best_by(step_ms, overlap.EXAMPLE, 100)
    steps = [step_ms(again) for again in (least, short)]
    extra = [chains.extra_ms(overlap.EXAMPLE, again) for again in (least, short)]
    assert (steps, extra) == ([130, 126], [21, 24])
    assert max(chains.peak_of(overlap.EXAMPLE, c) for c in (least, short)) <= 100


def test_a_table_without_measurement_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(measured.stored, "read", lambda lesson: None)
    assert measured.gpu_frontier() == measured.NOTHING
