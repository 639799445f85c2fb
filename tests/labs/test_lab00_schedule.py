"""0.1: whatever forgets a rule is refused by that rule; tables pass as functions do."""

from __future__ import annotations

import heapq
from fractions import Fraction

import pytest

import overlaplab as ol
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab00 import checks as lab00
from overlaplab_course.lab00 import given
from overlaplab_course.lab00 import launches as lab00_launches
from overlaplab_course.lab00.checks import unseen
from overlaplab_course.lab00.launches import (
    LAUNCH_US,
    Launch,
    as_program,
    resolved,
    six_launches,
)

NUMBERS = (6, 1, 17)


def solve(
    launches,
    launch_us,
    *,
    launch_cost=1,
    at_launch_begin=False,
    stream_order=True,
    waits=True,
    sync=True,
    sync_cost=0,
    one_queue=False,
    waits_hold_cpu=False,
    sync_waits_for_all=False,
):
    """The rules, each of which can be broken."""
    cpu, ends, pairs = 0, {}, []
    for _, stream, duration, after in launches:
        ready = max((pairs[i][1] for i in after), default=0)
        if stream == "cpu":
            if sync_waits_for_all:
                ready = max(ends.values(), default=0)
            begin, cpu = cpu, max(cpu, ready) if sync else cpu
            pairs.append((begin, cpu))
            cpu += sync_cost * launch_us
            continue
        if waits_hold_cpu:
            cpu = max(cpu, ready)
        begin = cpu
        cpu += launch_cost * launch_us
        start = begin if at_launch_begin else cpu
        if stream_order:
            start = max(start, ends.get("all" if one_queue else stream, 0))
        if waits:
            start = max(start, ready)
        ends["all" if one_queue else stream] = start + duration
        pairs.append((start, start + duration))
    return pairs


def backwards_from_causes(launches, launch_us):
    """Unusual: asks the resolver of the package."""
    rows = resolved(launches, launch_us)
    return [[row.start_us, row.end_us] for row in rows]


def events(launches, launch_us):
    """Unusual: an event queue, in exact fractions."""
    queue, done, position, cpu = [], {}, 0, Fraction(0)
    started = {}
    last = {}
    while position < len(launches):
        _, stream, duration, after = launches[position]
        if stream == "cpu":
            heapq.heappush(queue, (cpu, position))
            begin = cpu
            cpu = max([cpu, *(done[i] for i in after)])
            started[position], done[position] = begin, cpu
        else:
            cpu += Fraction(launch_us)
            before = [last[stream]] if stream in last else []
            start = max([cpu, *(done[i] for i in (*after, *before))])
            started[position], done[position] = start, start + duration
            last[stream] = position
        position += 1
    return tuple((started[i], done[i]) for i in range(len(launches)))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("right", [solve, backwards_from_causes, events])
def test_any_function_with_the_right_times_passes(right, number):
    verdict = judge(find_exercise("0.1"), number, lambda *a: right(*a))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_own_table_passes_in_any_numbers(number):
    table = solve(six_launches(number), LAUNCH_US)
    as_floats = [[float(a), float(b)] for a, b in table]
    for said in (table, as_floats):
        verdict = judge(find_exercise("0.1"), number, said)
        assert verdict.passed, str(verdict)
        assert "these six only" in verdict.note


def test_the_table_of_another_number_is_refused():
    table = solve(six_launches(1), LAUNCH_US)
    assert not judge(find_exercise("0.1"), 6, table).passed


WRONG = {
    "launches cost nothing": ({"launch_cost": 0}, lab00.LAUNCH),
    "starts when its launch begins": ({"at_launch_begin": True}, lab00.LAUNCH),
    "one queue for both streams": ({"one_queue": True}, lab00.LAUNCH),
    "streams without order": ({"stream_order": False}, lab00.STREAM),
    "nothing waits": ({"waits": False}, lab00.WAIT),
    "the CPU never waits": ({"sync": False}, lab00.SYNC),
    "a sync costs a launch": ({"sync_cost": 1}, lab00.SYNC),
    "a sync waits for everything": ({"sync_waits_for_all": True}, lab00.SYNC),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_forgotten_rule_is_refused_by_its_sentence(name, faults):
    slips, sentence = WRONG[name]
    verdict = judge(find_exercise("0.1"), 6, lambda *a: solve(*a, **slips))
    found = faults(verdict)
    assert sentence in found
    assert "us, expected" in found[sentence]
    assert verdict.timeline is not None


def test_waits_that_hold_the_cpu_are_refused(faults):
    verdict = judge(find_exercise("0.1"), 6, lambda *a: solve(*a, waits_hold_cpu=True))
    assert "for which it waits, ends then" in faults(verdict)[lab00.WAIT]


@pytest.mark.parametrize("number", range(40))
def test_every_number_draws_launches_on_which_each_rule_counts(number):
    own = six_launches(number)
    right = solve(own, LAUNCH_US)
    rows = [(row.start_us, row.end_us) for row in resolved(own, LAUNCH_US)]
    assert right == rows
    assert len([line for line in own if line.stream != "cpu"]) == 6
    for slips in ("launch_cost", "stream_order", "waits", "sync"):
        assert solve(own, LAUNCH_US, **{slips: 0}) != right


def test_a_wrong_row_is_described_with_the_line_that_holds_it(faults):
    own = six_launches(6)
    table = solve(own, LAUNCH_US)
    table[3] = (0, 10)
    found = " ".join(faults(judge(find_exercise("0.1"), 6, table)).values())
    assert "line 3 (mm 2): 0 to 10 us" in found
    rows = resolved(own, LAUNCH_US)
    assert f"{rows[3].start_us} to {rows[3].end_us} us" in found


def test_no_rule_is_called_right_that_the_first_wrong_row_leaves_open():
    table = solve(six_launches(6), LAUNCH_US)
    zeros = judge(find_exercise("0.1"), 6, [(0, 0)] * len(table))
    assert not any(check.passed for check in zeros.checks)
    assert len(zeros.unjudged) == 3
    assert str(zeros).count("not judged yet") == 3


def test_rules_that_many_programs_show_are_called_right_beside_a_broken_one():
    verdict = judge(find_exercise("0.1"), 6, lambda *a: solve(*a, waits=False))
    passed = {check.name for check in verdict.checks if check.passed}
    assert {lab00.LAUNCH, lab00.STREAM} <= passed
    free = judge(find_exercise("0.1"), 6, lambda *a: solve(*a, launch_cost=0))
    assert not any(check.passed for check in free.checks)


def test_operators_that_run_at_once_in_one_stream_are_drawn_beside_each_other():
    lines = [Launch("mm 1", "default", 20), Launch("mm 2", "default", 20)]
    spans = lab00.draw_pairs(lines, 10, [(10, 30), (20, 40)]).spans
    lanes = {span.name: span.lane for span in spans if span.kind == "compute"}
    assert lanes == {"mm 1": "default", "mm 2": "default, at once"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([(10, 20)] * 8, "8 pairs; expected 7"),
        (lambda launches, launch_us: [(10, 20)], "1 pairs; expected 7"),
        ([1, 2, 3], "expected a list of 7 pairs"),
        (lambda launches, launch_us: None, "expected a list of 7 pairs"),
        (lambda launches: [], "calling your code raised TypeError"),
        (lambda launches, launch_us: [("a", "b")] * len(launches), "expected a list"),
        ([(float("nan"), 1.0)] * 7, "expected a list of 7 pairs"),
    ],
)
def test_what_is_no_schedule_is_reported(said, words):
    verdict = judge(find_exercise("0.1"), 6, said)
    assert not verdict.passed
    assert words in verdict.error


@pytest.mark.parametrize("number", range(7))
def test_a_table_is_judged_as_far_as_it_goes(number):
    own = six_launches(6)
    verdict = judge(find_exercise("0.1"), 6, solve(own, LAUNCH_US)[:number])
    assert not verdict.passed and not verdict.checks
    assert f"{number} of 7 rows so far" in verdict.error
    assert f"Next: line {number} ({own[number].name})" in verdict.error
    assert (verdict.timeline is None) == (number == 0)


def test_a_wrong_row_of_a_short_table_is_described_and_nothing_else(faults):
    table = solve(six_launches(6), LAUNCH_US)[:2]
    table[1] = (20, 40)
    verdict = judge(find_exercise("0.1"), 6, table)
    assert list(faults(verdict)) == [lab00.WAIT]
    assert "line 1 (copy 1): 20 to 40 us" in str(verdict)
    assert "Next" not in str(verdict)


def test_a_function_cannot_change_the_launches_that_it_is_judged_on():
    def clears(launches, launch_us):
        right = solve(launches, launch_us)
        launches.clear()
        return right

    assert judge(find_exercise("0.1"), 6, clears).passed


def test_truth_is_what_the_resolver_says_of_the_written_program():
    lines = [
        Launch("copy 1", "copy", 30),
        Launch("mm 1", "default", 20, (0,)),
        Launch("item", "cpu", 0, (1,)),
        Launch("mm 2", "default", 5),
    ]
    timeline = ol.resolve(as_program(lines), given.GPU)
    assert timeline.order(("memcpy", "compute", "host")) == "\n".join(
        [
            "0 copy copy 1 10000-40000",
            "0 cpu wait item 20000-60000",
            "0 default mm 1 40000-60000",
            "0 default mm 2 70000-75000",
        ]
    )
    assert [row.reason for row in resolved(lines, LAUNCH_US)] == [
        "launch",
        "wait",
        "sync",
        "launch",
    ]


def test_unseen_programs_have_every_rule():
    reasons = {r.reason for lines, us in unseen() for r in resolved(lines, us)}
    assert reasons == {"launch", "stream", "wait", "sync"}


def test_launches_print_as_a_table():
    text = repr(lab00_launches.Launches([Launch("mm 1", "default", 20, (0, 2))]))
    assert text.splitlines()[1].split() == [
        "0",
        "mm",
        "1",
        "default",
        "20",
        "us",
        "0,",
        "2",
    ]
