"""5.5: constants and rules of thumb lose somewhere, and are told by how much."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab05 import checks as lab


def both_ms(costs):
    """(each, one), by the three chains."""
    c = costs
    last = c.latency_ms + c.last_ms
    cpu = c.launch_ms + c.num_gradients * c.collective_ms
    wire = c.compute_ms / 3 + c.num_gradients * c.latency_ms + c.wire_ms
    each = max(c.compute_ms + last, cpu + last, wire)
    one = max(c.compute_ms, c.launch_ms) + c.collective_ms + c.latency_ms + c.wire_ms
    return each, one


def always_each(costs):
    return "each"


def always_one(costs):
    return "one"


def launches_against_compute(costs):
    """Hooks lose as soon as the CPU has more to do than the GPU."""
    cpu = costs.launch_ms + costs.num_gradients * costs.collective_ms
    return "one" if cpu > costs.compute_ms else "each"


def kernels_only(costs):
    """What the messages cost the CPU is forgotten."""
    return both_ms_of(costs, collective_ms=0.0)


def latency_forgotten(costs):
    return both_ms_of(costs, latency_ms=0.0)


def forward_hides_too(costs):
    c = costs
    wire = c.num_gradients * c.latency_ms + c.wire_ms
    cpu = c.launch_ms + c.num_gradients * c.collective_ms
    return "each" if max(c.compute_ms, cpu, wire) < both_ms(c)[1] else "one"


def more_to_send_than_to_compute(costs):
    return "one" if costs.wire_ms > costs.compute_ms else "each"


def both_ms_of(costs, **changes):
    each, one = both_ms(costs._replace(**changes))
    return "each" if each < one else "one"


WRONG = {
    always_each: ("a fast link: ", "the CPU sets the pace"),
    always_one: ("captured, a fast link: ", "what hooks gain"),
    launches_against_compute: ("twice the tokens", "what hooks gain"),
    kernels_only: ("a fast link: ", "the CPU sets the pace"),
    latency_forgotten: ("captured, a link with latency", "count them"),
    forward_hides_too: ("captured, a link with latency", "count them"),
    more_to_send_than_to_compute: ("a fast link: ", "the CPU sets the pace"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_rule_of_thumb_is_refused_where_it_loses(wrong, faults):
    machine, hint = WRONG[wrong]
    verdict = judge(find_exercise("5.5"), wrong)
    found = faults(verdict)
    assert list(found) == [lab.SHORTER]
    assert machine in found[lab.SHORTER]
    assert hint in verdict.hint
    assert verdict.timeline is not None


@pytest.mark.parametrize("answer", [None, "both", True, "Each"])
def test_an_answer_that_is_no_way_is_refused(answer, faults):
    verdict = judge(find_exercise("5.5"), lambda costs: answer)
    found = faults(verdict)
    assert list(found) == [lab.USABLE]
    assert repr(answer) in found[lab.USABLE]


def by_three_chains(costs):
    each, one = both_ms(costs)
    return "each" if each < one else "one"


def by_playing_the_gradients(costs):
    """Gradients arrive evenly over the backward pass; walk through them."""
    c, n = costs, costs.num_gradients
    sizes = [(c.wire_ms - c.last_ms) / (n - 1)] * (n - 1) + [c.last_ms]
    wire = 0.0
    for i, ms in enumerate(sizes, 1):
        share = 1 / 3 + 2 / 3 * i / n
        there = max(share * c.compute_ms, share * c.launch_ms + i * c.collective_ms)
        wire = max(wire, there) + c.latency_ms + ms
    one = max(c.compute_ms, c.launch_ms) + c.collective_ms + c.latency_ms + c.wire_ms
    return "each" if wire < one else "one"


@pytest.mark.parametrize("right", [by_three_chains, by_playing_the_gradients])
def test_any_estimate_that_is_near_passes(right):
    verdict = judge(find_exercise("5.5"), right)
    assert verdict.passed, str(verdict)


def test_neither_way_is_the_best_everywhere_and_none_is_a_tie():
    better = {s.name: min(s.steps_ns, key=s.steps_ns.get) for s in lab.machines()}
    assert set(better.values()) == {"each", "one"}
    for setup in lab.machines():
        fast, slow = sorted(setup.steps_ns.values())
        assert slow > lab.AT_MOST * fast, setup.name
