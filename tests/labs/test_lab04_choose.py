"""4.9: every constant fails, and so do rules that look at one number."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.program import resolve
from overlaplab_course.lab04 import checks_extra, extras


@pytest.mark.parametrize("chunks", extras.CHUNKS)
def test_every_constant_answer_is_refused(chunks, faults):
    verdict = judge(find_exercise("4.9"), lambda *_: chunks)
    assert list(faults(verdict)) == [checks_extra.REGRET]


def only_the_latency(compute_us, overhead_us, latency_us, wire_us):
    return 1 if latency_us > 50 else 8


def as_many_as_the_wire_is_long(compute_us, overhead_us, latency_us, wire_us):
    return min(extras.CHUNKS, key=lambda n: abs(n - wire_us / compute_us))


def without_the_overhead(compute_us, overhead_us, latency_us, wire_us):
    return best_of_all(compute_us, 0, latency_us, wire_us)


def without_the_latency(compute_us, overhead_us, latency_us, wire_us):
    return best_of_all(compute_us, overhead_us, 0, wire_us)


def the_messages_alone(compute_us, overhead_us, latency_us, wire_us):
    return min(extras.CHUNKS, key=lambda n: n * latency_us + wire_us)


@pytest.mark.parametrize(
    "wrong",
    [
        only_the_latency,
        as_many_as_the_wire_is_long,
        without_the_overhead,
        without_the_latency,
        the_messages_alone,
    ],
)
def test_a_rule_that_leaves_out_a_cost_is_refused(wrong, faults):
    assert checks_extra.REGRET in faults(judge(find_exercise("4.9"), wrong))


@pytest.mark.parametrize("answer", [0, 3, 32, None, "1", True, float("nan")])
def test_an_answer_that_is_no_choice_is_refused(answer, faults):
    assert checks_extra.USABLE in faults(judge(find_exercise("4.9"), lambda *_: answer))


def best_of_all(compute_us, overhead_us, latency_us, wire_us):
    def step(n):
        compute = compute_us / n + overhead_us
        message = latency_us + wire_us / n
        return compute + (n - 1) * max(compute, message) + message

    return min(extras.CHUNKS, key=step)


def by_the_clock(compute_us, overhead_us, latency_us, wire_us):
    """A small simulation instead of the formula."""

    def step(n):
        computed = sent = 0.0
        for _ in range(n):
            computed += compute_us / n + overhead_us
            sent = max(sent, computed) + latency_us + wire_us / n
        return sent

    return min(extras.CHUNKS, key=step)


def doubled_while_it_pays(compute_us, overhead_us, latency_us, wire_us):
    case = extras.Case("", compute_us, overhead_us, latency_us, wire_us)
    n = 1
    while n < 16 and case.step_us(2 * n) < case.step_us(n):
        n *= 2
    return n


@pytest.mark.parametrize("right", [best_of_all, by_the_clock, doubled_while_it_pays])
def test_an_unusual_choice_passes(right):
    verdict = judge(find_exercise("4.9"), right)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("case", extras.CASES, ids=lambda case: case.name)
def test_the_formula_is_the_resolvers_step(case):
    for chunks in extras.CHUNKS:
        timeline = resolve(case.program(chunks), case.hardware())
        assert abs(timeline.step_ns / 1e3 - case.step_us(chunks)) < 0.1
