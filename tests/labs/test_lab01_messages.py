"""1.6: each unit mixed up is refused where it shows first, and named."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.hardware import collective_ns
from overlaplab_course.lab01 import checks_messages as lab
from overlaplab_course.lab01.checks_messages import Message, in_a_row
from overlaplab_course.lab01.messages import a_gigabyte, count, link_of


def solve(
    num_bytes,
    gbit_per_s,
    latency_us,
    num_messages,
    num_ranks,
    *,
    bits=8,
    giga=1e9,
    crossings="ring",
    latencies="each",
    latency=1000,
    each_whole=False,
    unit=1000,
    alone=True,
    hops="none",
):
    """The formula, each part of which can be wrong."""
    if num_ranks == 1 and alone:
        return 0
    n = num_ranks
    times = {
        "ring": 2 * (n - 1) / n,
        "once": 1,
        "everybody": n - 1,
        "half": (n - 1) / n,
    }
    sent = num_bytes * (num_messages if each_whole else 1)
    wire_s = times[crossings] * sent * bits / (gbit_per_s * giga)
    number = {"each": num_messages, "once": 1, "none": 0}[latencies]
    number *= {"none": 1, "ring": 2 * (n - 1), "tree": math.log2(n)}[hops]
    return unit * wire_s + unit * number * latency_us / (1000 * latency)


def in_exact_fractions(num_bytes, gbit_per_s, latency_us, num_messages, num_ranks):
    """Unusual: piece by piece round the ring, in fractions of a second."""
    if num_ranks < 2:
        return Fraction(0)
    piece = Fraction(num_bytes, num_messages * num_ranks) * 8 / (gbit_per_s * 10**9)
    hops = 2 * (num_ranks - 1)
    one = Fraction(latency_us) / 10**6 + hops * piece
    return 1000 * num_messages * one


def by_the_package(num_bytes, gbit_per_s, latency_us, num_messages, num_ranks):
    """Unusual: the cost formula that the virtual cluster uses."""
    latency_ns, wire_ns = collective_ns(
        link_of(gbit_per_s, latency_us), "all_reduce", num_ranks, num_bytes
    )
    return (num_messages * latency_ns + wire_ns) / 1e6


def in_nanoseconds(num_bytes, gbit_per_s, latency_us, num_messages, num_ranks):
    beta = 8 / gbit_per_s  # ns a byte
    alpha = 1e3 * latency_us * (num_ranks > 1)
    crossings = 2 - 2 / num_ranks
    return (
        sum(
            alpha + crossings * beta * num_bytes / num_messages
            for _ in range(num_messages)
        )
        / 1e6
    )


@pytest.mark.parametrize(
    "right", [solve, in_exact_fractions, by_the_package, in_nanoseconds]
)
def test_the_right_time_passes_however_it_is_found(right):
    verdict = judge(find_exercise("1.6"), lambda *a: right(*a))
    assert verdict.passed, str(verdict)


WRONG = {
    "bytes for bits": ({"bits": 1}, lab.ONE, "a byte is 8 bits"),
    "ten bits a byte": ({"bits": 10}, lab.ONE, ""),
    "binary gigabits": ({"giga": 2**30}, lab.ONE, "GiB and GB differ"),
    "seconds": ({"unit": 1}, lab.ONE, "that is in s"),
    "microseconds": ({"unit": 10**6}, lab.ONE, "that is in us"),
    "latency taken for ms": ({"latency": 1}, lab.ONE, "given in us"),
    "no latency": ({"latencies": "none"}, lab.ONE, "pays the latency"),
    "one way round the ring": ({"crossings": "half"}, lab.ONE, "must come back"),
    "to each other rank": ({"crossings": "everybody"}, lab.RING, "hardly more often"),
    "no ring": ({"crossings": "once"}, lab.RING, "crosses more than once"),
    "one latency for all": ({"latencies": "once"}, lab.MANY, "each message pays"),
    "each message has all": ({"each_whole": True}, lab.MANY, "all of them together"),
    "a latency each hop": ({"hops": "ring"}, lab.ONE, "alpha is paid once a message"),
    "a latency each level": (
        {"hops": "tree"},
        lab.RING,
        "alpha is paid once a message",
    ),
    "all in each, one latency": (
        {"each_whole": True, "latencies": "once"},
        lab.MANY,
        "the latency is what each message pays",
    ),
    "alone it still pays": ({"alone": False}, lab.NOBODY, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_slip_is_refused_by_its_sentence_and_named(name, faults):
    slips, sentence, words = WRONG[name]
    verdict = judge(find_exercise("1.6"), lambda *a: solve(*a, **slips))
    found = faults(verdict)
    assert next(iter(found)) == sentence
    assert words in verdict.hint
    assert "expected" in found[sentence]


@pytest.mark.parametrize("answer", [None, "80 ms", float("nan"), float("inf"), True])
def test_what_is_no_time_is_reported(answer, faults):
    found = faults(judge(find_exercise("1.6"), lambda *a: answer))
    assert "a number of ms" in found[lab.ONE]


def test_a_gigabyte_takes_80_ms_of_wire_and_a_tenth_for_each_message():
    one = in_a_row(Message(10**9, 100, 100, 1, 2)).end_ns
    forty = in_a_row(Message(10**9, 100, 100, 40, 2)).end_ns
    assert (one, forty) == (80_100_000, 84_000_000)


def test_the_sum_is_least_in_one_message_and_the_step_is_not():
    counted = count([1, 10, 100, 1000])
    ones = [c.one_ms for c in counted]
    sums = [c.all_ms for c in counted]
    steps = [c.step_ms for c in counted]
    assert ones == sorted(ones, reverse=True)
    assert sums == sorted(sums)
    assert steps.index(min(steps)) == 2


@pytest.mark.parametrize("number", [1, 5, 20, 200])
def test_the_gigabyte_is_cut_into_as_many_messages_as_asked(number):
    sent = [s for s in a_gigabyte(number).spans if s.kind == "communication"]
    assert len(sent) == number
    assert sum(s.bytes for s in sent) == 10**9
