"""10.4: constants, ratios and all the memory are refused; any search passes."""

from __future__ import annotations

import math

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.program import resolve
from overlaplab_course import lab10 as lab
from overlaplab_course.lab10 import checks, given
from overlaplab_course.lab10.depths import step_ms
from overlaplab_course.lab10.given import Stack


def slots_that_fit(gather_ms, layer_mib, memory_mib):
    return min(int(memory_mib // layer_mib), len(gather_ms))


def step(gather_ms, compute_ms, depth):
    wire = computed = 0
    ends = []
    for i, (gather, compute) in enumerate(zip(gather_ms, compute_ms, strict=True)):
        free = ends[i - depth - 1] if i > depth else 0
        wire = max(wire, free) + gather
        computed = max(computed, wire) + compute
        ends.append(computed)
    return round(computed, 6)


def by_simulation(gather_ms, compute_ms, layer_mib, memory_mib):
    slots = slots_that_fit(gather_ms, layer_mib, memory_mib)
    return min(range(slots), key=lambda d: step(gather_ms, compute_ms, d))


def constant(depth):
    return lambda *_: depth


def all_the_memory(gather_ms, compute_ms, layer_mib, memory_mib):
    return slots_that_fit(gather_ms, layer_mib, memory_mib) - 1


def depth_one_if_it_fits(gather_ms, compute_ms, layer_mib, memory_mib):
    return min(1, slots_that_fit(gather_ms, layer_mib, memory_mib) - 1)


def ratio_of_the_means(gather_ms, compute_ms, layer_mib, memory_mib):
    slots = slots_that_fit(gather_ms, layer_mib, memory_mib)
    return min(math.ceil(sum(gather_ms) / sum(compute_ms)), slots - 1)


def ratio_of_the_worst(gather_ms, compute_ms, layer_mib, memory_mib):
    slots = slots_that_fit(gather_ms, layer_mib, memory_mib)
    return min(math.ceil(max(gather_ms) / min(compute_ms)), slots - 1)


def no_regard_for_memory(gather_ms, compute_ms, layer_mib, memory_mib):
    return min(range(16), key=lambda d: step(gather_ms, compute_ms, d))


def one_slot_too_many(gather_ms, compute_ms, layer_mib, memory_mib):
    """Takes the number of slots for the depth."""
    return by_simulation(gather_ms, compute_ms, layer_mib, memory_mib) + 1


def slots_never_reused(gather_ms, compute_ms, layer_mib, memory_mib):
    """The gather may start when d layers before it *start*: half a ring too early."""
    return min(2, slots_that_fit(gather_ms, layer_mib, memory_mib) - 1)


def in_mib(gather_ms, compute_ms, layer_mib, memory_mib):
    return memory_mib


def nothing(gather_ms, compute_ms, layer_mib, memory_mib):
    return None


def the_average(gather_ms, compute_ms, layer_mib, memory_mib):
    return sum(gather_ms) / sum(compute_ms)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        *((constant(depth), checks.REGRET) for depth in (0, 1, 2, 3)),
        *((constant(depth), checks.FITS) for depth in (1, 2, 3, 4, 5, 7)),
        *((constant(depth), checks.LEAST) for depth in (1, 2, 4, 7)),
        (depth_one_if_it_fits, checks.REGRET),
        (all_the_memory, checks.LEAST),
        (ratio_of_the_means, checks.REGRET),
        (ratio_of_the_worst, checks.LEAST),
        (no_regard_for_memory, checks.FITS),
        (one_slot_too_many, checks.LEAST),
        (slots_never_reused, checks.REGRET),
        (in_mib, checks.FITS),
        (nothing, checks.USABLE),
        (the_average, checks.USABLE),
    ],
)
def test_a_wrong_depth_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("10.4"), wrong)
    assert sentence in faults(verdict), str(verdict)


def test_a_slot_for_nothing_is_told_the_least_depth_that_is_as_good(faults):
    found = faults(judge(find_exercise("10.4"), all_the_memory))[checks.LEAST]
    assert ": depth 7 takes 170.0 ms, and so does depth 1: 170.0 ms" in found
    assert "expected depth 1, the least that takes 170.0 ms" in found


def by_growing(gather_ms, compute_ms, layer_mib, memory_mib):
    """One deeper as long as it saves half a percent."""
    slots, depth = slots_that_fit(gather_ms, layer_mib, memory_mib), 0
    while depth + 1 < slots:
        now, then = (step(gather_ms, compute_ms, d) for d in (depth, depth + 1))
        if then > 0.995 * now:
            break
        depth += 1
    return depth


def by_longest_path(gather_ms, compute_ms, layer_mib, memory_mib):
    """As a graph: the ends by their definitions, not in a loop over time."""

    def end_of_all(depth):
        gathered, computed = [0.0], [0.0]
        for i, both in enumerate(zip(gather_ms, compute_ms, strict=True), start=1):
            gathered.append(
                max(gathered[-1], computed[max(0, i - depth - 1)]) + both[0]
            )
            computed.append(max(computed[-1], gathered[-1]) + both[1])
        return computed[-1]

    times = [
        end_of_all(d) for d in range(slots_that_fit(gather_ms, layer_mib, memory_mib))
    ]
    return float(next(d for d, t in enumerate(times) if t <= 1.001 * min(times)))


@pytest.mark.parametrize("right", [by_simulation, by_growing, by_longest_path])
def test_any_way_to_find_the_depth_passes(right):
    verdict = judge(find_exercise("10.4"), right)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_count_is_what_the_cluster_says(depth):
    """On a board without launch costs, to a microsecond."""
    stack = Stack(num_layers=6, tables=(0, 0, 300, 0, 0, 200))
    seen = lab.play_ours(depth, stack)
    board = given.replace(given.BOARD, launch_ns=0, collective_launch_ns=0)
    timeline = resolve(seen.program, board).of_rank(0)
    spans = [s for s in timeline.spans if s.kind == "communication"]
    gathers = [(s.end_ns - s.start_ns) / 1e6 for s in spans]
    counted = step_ms(gathers, [8.0] * 6, depth)
    assert timeline.step_ns / 1e6 == pytest.approx(counted, abs=1e-3)


def test_no_constant_loses_little_on_every_model():
    for depth in range(20):
        cases = checks.depth_cases()
        fits = [case for case in cases if depth <= case.most]
        assert len(fits) < len(cases) or any(c.regret(depth) > 0.2 for c in fits)


def test_the_answers_range_from_none_to_many():
    assert {case.least for case in checks.depth_cases()} >= {0, 1, 2, 3, 5, 7}
