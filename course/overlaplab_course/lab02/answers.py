"""A dict of numbers, one sentence each: what exercises that read traces are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from overlaplab.grading.exercise import Sheet


class Answer(NamedTuple):
    """One number that a learner reads.

    Args:
        sentence: what the grader promises about it.
        right: the number.
        within: how far off it may be.
        how: how it is read, told where it is wrong.
        slips: wrong numbers and what they are, told with them.
    """

    sentence: str
    right: float
    within: float
    how: str
    slips: tuple[tuple[float, str], ...] = ()


def grade_answers(
    sheet: Sheet, said: Mapping[str, Any], answers: Mapping[str, Answer]
) -> None:
    """Each number alone.

    Raises:
        TypeError: `said` is no dict.
    """
    if not isinstance(said, Mapping):
        raise TypeError(
            f"got {type(said).__name__}; expected a dict with the keys {list(answers)}"
        )
    for key, answer in answers.items():
        value = said.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            seen = f"{key!r} is {value!r}" if key in said else f"there is no {key!r}"
            sheet.expect(
                answer.sentence, False, seen=seen, expected=f"a number: {answer.how}"
            )
            continue
        good = abs(value - answer.right) <= answer.within
        slip = "" if good else _slip(value, answer)
        sheet.expect(
            answer.sentence,
            bool(good),
            seen=f"{key}: {value:.6g}" + (f"\n{slip}" if slip else ""),
            expected=answer.how,
        )


def _slip(value: float, answer: Answer) -> str:
    """What a wrong number probably is, "" if nobody knows."""
    slips = (
        (1e6 * answer.right, "that is in ns"),
        (1e3 * answer.right, "that is in us"),
        (-answer.right, "the other way round"),
        *answer.slips,
    )
    for wrong, what in slips:
        tolerance = answer.within * max(1.0, abs(wrong / (answer.right or 1)))
        if (
            abs(wrong - answer.right) > answer.within
            and abs(value - wrong) <= tolerance
        ):
            return what
    return ""
