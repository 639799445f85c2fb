"""3.2: as few waits as the job allows, by any way of finding them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab03
from overlaplab_course.lab03 import checks
from overlaplab_course.lab03.jobs import (
    LOAD,
    WIRE,
    Job,
    Piece,
    fewest_waits,
    pipeline,
)

NUMBERS = (0, 1, 2, 3, 17)


def without(number, *dropped):
    return [w for w in fewest_waits(pipeline(number)) if w not in dropped]


def over_ordered():
    """One wait more than enough is left out by letting everything wait for `send 1`."""
    return [w for w in without(2) if w != ("load 2", "work 2")] + [("send 1", "work 2")]


WRONG = {
    "every wait": (lambda: pipeline(3).every_wait, 3, checks.FEW, "19 waits"),
    "one too many": (
        lambda: [*without(3), ("load 3", "send 3")],
        3,
        checks.FEW,
        "12 waits",
    ),
    "one twice": (lambda: [*without(3), without(3)[0]], 3, checks.FEW, "12 waits"),
    "none": (lambda: [], 3, checks.SAFE, "does not wait for"),
    "no wait before overwriting": (
        lambda: without(3, ("send 1", "load 3")),
        3,
        checks.SAFE,
        "load 3",
    ),
    "a message too early": (
        lambda: without(3, ("work 2", "send 2")),
        3,
        checks.SAFE,
        "send 2",
    ),
    "another task's wait": (over_ordered, 2, checks.SAFE, "load 2"),
    "backwards": (
        lambda: [*without(3), ("work 1", "load 1")],
        3,
        checks.KNOWN,
        "not recorded yet",
    ),
    "no such task": (
        lambda: [*without(3), ("lode 1", "work 1")],
        3,
        checks.KNOWN,
        "no pair of tasks",
    ),
    "no pair": (lambda: [*without(3), "load 1"], 3, checks.KNOWN, "no pair of tasks"),
    "a wait for what it does not need": (
        lambda: [*without(2), ("send 1", "work 2")],
        2,
        checks.SHORT_STEP,
        "the step took",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_waits_are_refused_for_their_own_reason(case, faults):
    make, number, sentence, reason = WRONG[case]
    found = faults(judge(find_exercise("3.2"), number, make()))
    assert sentence in found
    assert reason in found[sentence]


def by_trial(own):
    left = list(own.every_wait)
    for wait in own.every_wait:
        fewer = [w for w in left if w != wait]
        if not own.play(fewer).findings:
            left = fewer
    return left


@pytest.mark.parametrize("number", NUMBERS)
def test_the_fewest_pass_and_each_of_them_is_needed(number):
    own = pipeline(number)
    verdict = judge(find_exercise("3.2"), number, fewest_waits(own))
    assert verdict.passed, str(verdict)
    for wait in fewest_waits(own):
        assert own.play(without(number, wait)).findings, wait


def test_leaving_out_by_trial_finds_the_same_waits():
    assert set(by_trial(pipeline(1))) == set(fewest_waits(pipeline(1)))


def test_a_set_of_lists_in_any_order_passes():
    lists = [list(wait) for wait in reversed(fewest_waits(pipeline(3)))]
    assert judge(find_exercise("3.2"), 3, iter(lists)).passed


def test_numbers_draw_jobs_that_differ():
    assert len({str(pipeline(n)) for n in range(12)}) >= 6


def test_a_wait_that_cannot_be_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match=r"'load 2' is launched after 'load 1'"):
        pipeline(3).play([("load 2", "load 1")])


def test_needs_are_the_last_writer_and_the_readers_since():
    job = Job(
        "small",
        (
            Piece("fill", LOAD, 1, (), "a"),
            Piece("read", WIRE, 1, ("a",), "b"),
            Piece("fill again", LOAD, 1, (), "a"),
            Piece("read again", WIRE, 1, ("a",), "b"),
        ),
    )
    assert [job.needs[p.name] for p in job.pieces] == [
        (),
        ("fill",),
        ("read",),
        ("read", "fill again"),
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_the_fewest_waits_imply_every_wait(number):
    job = pipeline(number)
    edges = {*fewest_waits(job), *zip_streams(job)}
    reach = {p.name: {p.name} for p in job.pieces}
    for piece in job.pieces:
        for first, then in edges:
            if then == piece.name:
                reach[then] |= reach[first]
    assert all(first in reach[then] for first, then in job.every_wait)


def zip_streams(job):
    for on in ("load", "compute", "wire"):
        names = [p.name for p in job.pieces if p.on == on]
        yield from itertools.pairwise(names)


def test_a_wait_too_many_does_not_give_the_number_away(faults):
    verdict = judge(find_exercise("3.2"), 3, pipeline(3).every_wait)
    assert faults(verdict) == {checks.FEW: "19 waits, expected fewer"}


def test_a_guess_stands_beside_what_is_needed(capsys):
    lab03.compare_waits(pipeline(3), 13)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "waits needed:  your guess: 13; actual: 11"
    assert len(lines) == 1 + 19 - 11
