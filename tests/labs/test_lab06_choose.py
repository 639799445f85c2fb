"""6.4a: every constant fails, so does each half of the argument; good rules pass."""

from __future__ import annotations

import bisect
import math
import time

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.hardware import find_hardware, with_link
from overlaplab.program import PayloadTensor, ProgramBuilder, replay
from overlaplab_course.lab06 import checks
from overlaplab_course.lab06.given import MIB, NUM_RANKS, pack
from overlaplab_course.lab06.pairs import cases

CONSTANTS_MIB = (1, 5, 10, 25, 50, 100, 200)


def end_ns(sizes, ready, latency_ns, bytes_per_s, cap):
    end = 0
    for bucket in pack(sizes, cap):
        wire = sum(sizes[i] for i in bucket) * 1e9 / bytes_per_s
        end = max(end, ready[bucket[-1]]) + latency_ns + wire
    return end


def powers_of_two(sizes):
    return [2**k for k in range(min(sizes).bit_length(), sum(sizes).bit_length() + 1)]


def constant_25_mib(sizes, ready, latency_ns, bytes_per_s):
    return 25 * MIB


def only_the_tail(sizes, ready, latency_ns, bytes_per_s):
    """The last message is shortest where every message is."""
    return min(sizes)


def only_the_sum(sizes, ready, latency_ns, bytes_per_s):
    """Fewest messages, least latency."""
    return sum(sizes)


def half_the_latency(sizes, ready, latency_ns, bytes_per_s):
    def cost(cap):
        return end_ns(sizes, ready, latency_ns / 2, bytes_per_s, cap)

    return min((min(sizes) * 1.1**k for k in range(160)), key=cost)


def latency_in_microseconds(sizes, ready, latency_ns, bytes_per_s):
    return sum(sizes) / math.sqrt(ready[-1] / (latency_ns / 1000))


def bandwidth_forgotten(sizes, ready, latency_ns, bytes_per_s):
    """As if the wire were free: the last bucket always waits for the backward pass."""
    return min(
        powers_of_two(sizes),
        key=lambda cap: end_ns(sizes, ready, latency_ns, 10**18, cap),
    )


def cached_by_name():
    answers = {}

    def choose_cap(sizes, ready, latency_ns, bytes_per_s):
        if len(sizes) not in answers:
            answers[len(sizes)] = closed_form(sizes, ready, latency_ns, bytes_per_s)
        return answers[len(sizes)]

    return choose_cap


def by_the_wall_clock(sizes, ready, latency_ns, bytes_per_s):
    """Times packing on this machine: one bucket packs fastest, whatever the link."""

    def seconds(cap):
        start = time.perf_counter()
        num_buckets = len(pack(sizes, cap))
        return time.perf_counter() - start + 1e-3 * num_buckets

    return min(powers_of_two(sizes), key=seconds)


def closed_form(sizes, ready, latency_ns, bytes_per_s):
    return sum(sizes) / max(1.0, math.sqrt(ready[-1] / latency_ns))


WRONG = {
    "constant_25_mib": (constant_25_mib, "GPT of 6 x 256, 8k tokens, Ethernet"),
    "only_the_tail": (only_the_tail, "your choice loses 100%"),
    "only_the_sum": (only_the_sum, "your choice loses 100%"),
    "half_the_latency": (half_the_latency, "24 x 256, 2k tokens, NVLink"),
    "latency_in_microseconds": (latency_in_microseconds, "your choice loses"),
    "bandwidth_forgotten": (bandwidth_forgotten, "your choice loses"),
    "cached_by_name": (cached_by_name(), "8k tokens, InfiniBand"),
    "by_the_wall_clock": (by_the_wall_clock, "your choice loses 100%"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_choice_is_refused_for_what_it_loses(wrong, faults):
    choose_cap, reason = WRONG[wrong]
    found = faults(judge(find_exercise("6.4a"), choose_cap))
    assert list(found) == [checks.REGRET]
    assert reason in found[checks.REGRET]


@pytest.mark.parametrize("unit", [MIB, 2**30])
def test_an_answer_in_another_unit_is_hinted_at(unit):
    verdict = judge(find_exercise("6.4a"), lambda *case: closed_form(*case) / unit)
    assert verdict.hint == "the answer is in bytes, not MiB and not a number of buckets"
    assert judge(find_exercise("6.4a"), constant_25_mib).hint == ""


@pytest.mark.parametrize("mib", CONSTANTS_MIB)
def test_no_constant_is_good_enough_on_all_pairs(mib):
    assert max(case.regret(mib * MIB) for case in cases()) > checks.AT_MOST


def test_every_single_cap_fails_somewhere():
    caps = [MIB * 2 ** (k / 4) for k in range(-16, 40)]
    best = min(max(case.regret(cap) for case in cases()) for cap in caps)
    assert best > checks.AT_MOST


@pytest.mark.parametrize("answer", [0, -5, None, float("nan"), "25 MiB"])
def test_an_answer_that_is_no_size_is_refused(answer, faults):
    found = faults(judge(find_exercise("6.4a"), lambda *_: answer))
    assert repr(answer) in found[checks.USABLE]


def golden_section(sizes, ready, latency_ns, bytes_per_s):
    def cost(x):
        return end_ns(sizes, ready, latency_ns, bytes_per_s, math.exp(x))

    low, high = math.log(min(sizes)), math.log(sum(sizes))
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if cost(left) < cost(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def what_the_wire_keeps_up_with_doubled(sizes, ready, latency_ns, bytes_per_s):
    """The smallest cap at which the messages fit in the backward pass, times two."""
    wire = sum(sizes) * 1e9 / bytes_per_s
    caps = [min(sizes) * 1.05**k for k in range(400)]

    def keeps_up(cap):
        return len(pack(sizes, cap)) * latency_ns + wire <= ready[-1]

    first = bisect.bisect_left(caps, True, key=keeps_up)
    if first == len(caps):
        return closed_form(sizes, ready, latency_ns, bytes_per_s)
    return int(2 * caps[first])


RIGHT = (closed_form, golden_section, what_the_wire_keeps_up_with_doubled)


@pytest.mark.parametrize("right", RIGHT, ids=lambda f: f.__name__)
def test_an_unusual_right_choice_passes(right):
    verdict = judge(find_exercise("6.4a"), right)
    assert verdict.passed, str(verdict)


def program_of(case):
    """One message per gradient, for `replay` to group."""
    builder = ProgramBuilder(num_ranks=1, represents=NUM_RANKS)
    before_ns = 0
    for i, (size, ready_ns) in enumerate(
        zip(case.grad_bytes, case.ready_ns, strict=True)
    ):
        op = None
        if ready_ns > before_ns:
            op = builder.compute(0, f"backward {i}", ns=ready_ns - before_ns)
        gradient = PayloadTensor(size, "float32", op, f"gradient {i}")
        builder.collective(0, "all_reduce", payload=[gradient])
        before_ns = ready_ns
    return builder.build()


def hardware_of(case):
    """`chalk` (no launch cost, no contention) with the link of the case."""
    crossings = 2 * (NUM_RANKS - 1) / NUM_RANKS
    return with_link(
        find_hardware("chalk"),
        latency_ns=case.latency_ns,
        bytes_per_s=int(case.bytes_per_s * crossings),
    )


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_marked_step_is_the_resolver_s(case):
    cap = case.best_cap_bytes
    timeline = replay(program_of(case), hardware=hardware_of(case), buckets=cap)
    end = max(span.end_ns for span in timeline.spans)
    assert end == pytest.approx(case.step_ns(cap), rel=1e-4)
