"""Every exercise of every lab holds each law of programs, or says why it does not."""

from __future__ import annotations

import pytest

from overlaplab.grading import exercises
from overlaplab.grading.exercise import LAWS, TWICE, exercise
from tests.labs.conftest import STORED

LABS = {"00", "01", "02", "03", "04", "05", "06", "08", "10", "13", "16"}
EVERY = [e for e in exercises() if e.lab in LABS]


def test_the_walk_meets_every_lab():
    assert {e.lab for e in EVERY} == LABS


@pytest.mark.parametrize("one", EVERY, ids=lambda e: e.id)
def test_an_exercise_carries_each_law_or_says_why_not(one):
    assert {*one.laws} | ({*one.left_out} - {*TWICE}) == {*LAWS}
    assert not {*one.laws} & {*one.left_out}
    assert {*one.laws.values()} <= {*one.verifies}
    assert all(len(reason.split()) > 1 for reason in one.left_out.values())


def test_every_exercise_has_a_solution_that_passes_and_so_shows_its_fixtures():
    """See conftest.py: two worlds, two shapes, two clocks, or a reason why not."""
    passed = {row.split("\t")[1] for row in STORED if row.endswith("\tpassed")}
    assert not {e.id for e in EVERY} - passed


def test_half_of_the_exercises_run_programs_and_hold_the_laws():
    held = [e.id for e in EVERY if "hazard" in e.laws and "recorded" in e.laws]
    assert {"4.1", "4.5", "5.3", "6.2", "6.3", "8.3", "10.3"} <= {*held}
    assert len(held) >= 20


@pytest.mark.parametrize(
    ("laws", "left_out", "words"),
    [
        ({"hazard": "another"}, {}, "no sentence carries the law 'hazard'"),
        ({"speed": "it is so"}, {}, "no sentence carries the law 'speed'"),
        ({}, {"speed": "who knows"}, "no sentence carries the law 'speed'"),
        ({"cpu": "it is so"}, {"cpu": "who knows"}, "leaves out the law 'cpu'"),
    ],
)
def test_a_law_that_nothing_carries_is_refused(laws, left_out, words):
    with pytest.raises(ValueError, match=words):
        exercise(
            "98.8",
            title="t",
            solution="s",
            verifies=("it is so",),
            laws=laws,
            left_out=left_out,
        )
