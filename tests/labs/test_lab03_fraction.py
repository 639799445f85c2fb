"""3.1b: the overlap fraction of the learner's own run, and no other ratio."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab03.checks_extra import OVERLAP, THE_RUN
from overlaplab_course.lab03.jobs import EAGER, backward_job, one_stream, play
from overlaplab_course.lab03.reference import issue
from tests.labs.test_lab03_issue import (
    EventsOfOneStreamOnly,
    Issue,
    TwoPasses,
    WaitsForTheWholeStreamIfItNeedsOne,
)


@cache
def run_of(issued):
    return play(backward_job(), issued, EAGER)


def report_of(issued):
    return run_of(issued).timeline.report()


def said_of(issued, answer):
    return judge(find_exercise("3.1b"), run_of(issued), answer)


def test_the_ratios_of_this_run_are_far_enough_from_one_another_to_be_told_apart():
    report = report_of(issue)
    ratios = [
        report.overlap_fraction,
        report.saved_fraction,
        report.efficiency,
        1 - report.overlap_fraction,
        report.hidden_ns / report.compute_ns,
        report.hidden_ns / report.step_ns,
    ]
    ordered = sorted(ratios)
    gaps = [b - a for a, b in pairwise(ordered)]
    assert min(gaps) > 0.02


def read(report):
    return report.hidden_ns / report.communication_ns


def rounded(report):
    return round(read(report), 2)


def by_what_is_exposed(report):
    return 1 - report.exposed_ns / report.communication_ns


def of_the_property(report):
    return report.overlap_fraction


@pytest.mark.parametrize(
    "issued",
    [issue, Issue(), TwoPasses(), EventsOfOneStreamOnly(), one_stream],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
@pytest.mark.parametrize("ask", [read, rounded, by_what_is_exposed, of_the_property])
def test_the_fraction_of_ones_own_run_passes_however_it_is_found(issued, ask):
    verdict = said_of(issued, ask(report_of(issued)))
    assert verdict.passed, str(verdict)


WRONG = {
    "saved": (lambda r: r.saved_fraction, "saved fraction"),
    "efficiency": (lambda r: r.efficiency, "that is the efficiency"),
    "exposed": (lambda r: r.exposed_ns / r.communication_ns, "that is exposed"),
    "of the step": (lambda r: r.hidden_ns / r.step_ns, "hidden / step"),
    "of the compute": (lambda r: r.hidden_ns / r.compute_ns, "hidden / compute"),
    "percent": (lambda r: 100 * r.overlap_fraction, "divide percents by 100"),
    "all": (lambda r: 1.0, ""),
    "just outside": (lambda r: r.overlap_fraction + 0.015, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_ratio_is_refused_by_its_name(name, faults):
    answer, says = WRONG[name]
    verdict = said_of(issue, answer(report_of(issue)))
    assert list(faults(verdict)) == [OVERLAP]
    assert says in str(verdict)


SLOW_STREAMS = WaitsForTheWholeStreamIfItNeedsOne()


def test_the_fraction_of_another_run_is_refused(faults):
    best, own = read(report_of(issue)), read(report_of(SLOW_STREAMS))
    assert own < best - 0.05
    assert list(faults(said_of(SLOW_STREAMS, best))) == [OVERLAP]
    assert said_of(SLOW_STREAMS, own).passed


@pytest.mark.parametrize("what", ["of the first machine", "text"])
def test_a_run_on_which_all_ratios_are_one_is_not_taken(what, faults):
    run = "a run" if what == "text" else play(backward_job(), issue)
    verdict = judge(find_exercise("3.1b"), run, 10 / 11)
    assert list(faults(verdict)) == [THE_RUN]


@pytest.mark.parametrize("answer", [None, "half", float("nan")])
def test_what_is_no_number_is_refused(answer):
    assert not said_of(issue, answer).passed
