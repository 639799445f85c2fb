"""`check("6.3", BucketedReducer)`: the check of one exercise, inside the notebook."""

from __future__ import annotations

from overlaplab.grading.exercise import Exercise
from overlaplab.grading.verdict import Verdict


class CheckFailed(AssertionError):  # noqa: N818 (reads as a sentence in the notebook)
    """The check did not pass; the verdict has been printed above."""


def judge(exercise: Exercise, *solutions: object) -> Verdict:
    """Grade, catching everything: never raises but for an interrupt."""
    raise NotImplementedError


def check(exercise_id: str, *solutions: object) -> Verdict:
    """Run the check of `exercise_id` on the learner's object(s), print and draw it.

    Returns:
        The verdict, if it passed.

    Raises:
        CheckFailed: it did not.
    """
    raise NotImplementedError
