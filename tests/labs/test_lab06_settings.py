"""6.6: settings of DDP are judged by what they do."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab06 import checks
from overlaplab_course.lab06.trials import try_ddp

RIGHT = {
    "one message": {"bucket_cap_mb": 100},
    "no copies": {"gradient_as_bucket_view": True},
    "unused parameter": {"find_unused_parameters": True},
    "short step": {"bucket_cap_mb": 0.3},
}
OTHER_RIGHT = {
    "one message": {"bucket_cap_mb": 25, "gradient_as_bucket_view": True},
    "no copies": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    "unused parameter": {"static_graph": True},
    "short step": {"bucket_cap_mb": 0.25},
}
WRONG = {
    "one message": ({}, checks.ONE, "2 messages"),
    "no copies": ({"static_graph": True}, checks.NO_COPIES, "copies"),
    "unused parameter": ({}, checks.UNUSED, "Expected to have finished"),
    "short step": ({"bucket_cap_mb": 25}, checks.SHORT, "the best size takes"),
}


@pytest.mark.parametrize("wishes", [RIGHT, OTHER_RIGHT], ids=["plain", "other"])
def test_settings_that_do_what_is_wished_pass(wishes):
    verdict = judge(find_exercise("6.6"), wishes)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("wish", WRONG)
def test_settings_that_do_not_are_refused_by_their_run(wish, faults):
    settings, sentence, reason = WRONG[wish]
    found = faults(judge(find_exercise("6.6"), {**RIGHT, wish: settings}))
    assert list(found) == [sentence]
    assert reason in found[sentence]


@pytest.mark.parametrize(
    "settings",
    [{"bucket_size": 1}, None, {"gradient_as_bucket_views": True}],
    ids=["no such name", "nothing", "misspelled"],
)
def test_settings_that_ddp_does_not_take_are_refused(settings, faults):
    found = faults(judge(find_exercise("6.6"), {**RIGHT, "no copies": settings}))
    assert list(found) == [checks.KNOWN]


def test_no_other_size_is_better_or_worse_than_the_marked_ones():
    steps = [try_ddp(bucket_cap_mb=mb).step_ns for mb in (0.05, 0.2, 0.5, 1)]
    assert checks.best_ns() <= 1.02 * min(steps)
    assert checks.worst_ns() >= max(steps)


def test_typing_the_default_cap_loses_the_small_first_bucket():
    assert len(try_ddp().messages) == 2
    assert len(try_ddp(bucket_cap_mb=25).messages) == 1
