"""Exercise 2.2: the union of intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline.intervals import Interval
from overlaplab.timeline.intervals import merge as true_merge

UNION = "it covers what any of the intervals covers, and nothing else"
APART = "it is ascending, and intervals that touch are one"
EMPTY = "empty intervals vanish"
EXACT = "integers stay exact, however large"
PURE = "the list that it is given stays as it was"

_HINTS = {
    UNION: "an interval may lie inside one before it: take the larger end",
    APART: "(0, 3) and (3, 4) are (0, 4)",
    EMPTY: "(8, 8) has no length",
    EXACT: "no float in between: a clock in ns has 19 digits, a float 16",
    PURE: "sorted(x) makes a new list; x.sort() does not",
}

Merge = Callable[[list[Interval]], Any]
NUM_RANDOM = 300


def cases() -> Iterator[list[Interval]]:
    """Small ones that a person would think of, then many at random, then large."""
    yield []
    yield [(2, 5)]
    yield [(0, 3), (5, 9)]
    yield [(5, 9), (0, 3)]
    yield [(0, 10), (2, 3), (4, 6)]
    yield [(0, 4), (2, 6), (5, 8)]
    yield [(0, 3), (3, 4)]
    yield [(8, 8)]
    yield [(0, 3), (5, 5), (7, 9)]
    yield [(0, 3), (3, 3)]
    draw = random.Random(2)
    for _ in range(NUM_RANDOM):
        starts = [draw.randrange(30) for _ in range(draw.randrange(9))]
        yield [(s, s + draw.choice((0, 1, 2, 3, 5, 12))) for s in starts]
    base = 1_700_000_000_000_000_000
    yield [(base + 1, base + 3), (base + 4, base + 5), (base + 700, base + 900)]


@exercise(
    "2.2",
    title="merge intervals",
    solution="merge",
    verifies=(UNION, APART, EMPTY, EXACT, PURE),
    points=1,
    timeout_s=10.0,
)
def grade_merge(sheet: Sheet, merge: Merge) -> None:
    """Every case; the first that is wrong is told under the law that it breaks."""
    sheet.ran(f"{NUM_RANDOM} lists of intervals at random, and the odd ones")
    faults: dict[str, tuple[object, object, object]] = {}
    for case in cases():
        given = list(case)
        said = _pairs(merge(given), case)
        if given != case:
            faults.setdefault(PURE, (case, given, case))
        right = true_merge(case)
        if said != right:
            law = _law(case, said, right)
            faults.setdefault(law, (case, said, right))
    for sentence, hint in _HINTS.items():
        if sentence not in faults:
            sheet.expect(sentence, True)
            continue
        given_case, seen, expected = faults[sentence]
        what = "the list became" if sentence == PURE else "merge gives"
        sheet.expect(
            sentence,
            False,
            seen=f"of {given_case}\n{what} {seen}",
            expected=f"{expected}",
            hint=hint,
        )


def _law(case: list[Interval], said: list[Interval], right: list[Interval]) -> str:
    """Which law a wrong answer breaks."""
    if any(start > 2**53 for start, _ in case):
        return EXACT
    if any(start >= end for start, end in said):
        return EMPTY
    if _cells(said) != _cells(right):
        return UNION
    return APART


def _cells(intervals: list[Interval]) -> set[int]:
    return {cell for start, end in intervals for cell in range(start, end)}


def _pairs(said: object, case: list[Interval]) -> list[Interval]:
    """The answer as pairs of numbers.

    Raises:
        ValueError: it is something else.
    """
    try:
        pairs = [(start, end) for start, end in said]  # type: ignore[attr-defined]
        whole = [(int(start), int(end)) for start, end in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"merge({case}) is {said!r:.200}; expected a list of pairs (start, end)"
        ) from error
    return whole
