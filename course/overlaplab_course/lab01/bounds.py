"""Exercise 1.2: serial, bound and the best speed-up, where either side is the longer.

Truth is a pair of operators that need nothing of one another, resolved one after the
other and at once: nothing overlaps better.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab_course.lab01.numbers import close, read_numbers
from overlaplab_course.lab01.steps import NS_PER_MS, pair_timeline

SERIAL = "serial: the step if nothing overlaps"
BOUND = "bound: the step if all that can be is hidden, with less to send than compute"
SENDING = "and with more to send than to compute"
SPEEDUP = "best speed-up: how many times the bound goes into serial"

Bounds = Callable[[float, float], Any]


@lru_cache(maxsize=1)
def pairs() -> tuple[tuple[int, int], ...]:
    """(Tc, Tm) in ms; those of the lesson, one of each without a side, many more."""
    draw = random.Random(101)
    many = [(draw.randrange(1, 200), draw.randrange(1, 200)) for _ in range(40)]
    return (
        (100, 50), (100, 25), (40, 40), (50, 100), (30, 90), (70, 0), (0, 20), *many
    )  # fmt: skip


@exercise(
    "1.2",
    title="bounds",
    solution="bounds",
    verifies=(SERIAL, BOUND, SENDING, SPEEDUP),
    points=1,
    timeout_s=20.0,
)
def grade_bounds(sheet: Sheet, bounds: Bounds) -> None:
    """Each number against two timelines of the same two operators."""
    sheet.ran(f"bounds(tc, tm) on {len(pairs())} pairs; each pair run both ways")
    shown = False
    for tc, tm in pairs():
        answer = _ask(bounds, tc, tm)
        serial = pair_timeline(tc * NS_PER_MS, tm * NS_PER_MS, at_once=False)
        best = pair_timeline(tc * NS_PER_MS, tm * NS_PER_MS, at_once=True)
        serial_ms, best_ms = serial.step_ns / NS_PER_MS, best.step_ns / NS_PER_MS
        truth = (serial_ms, best_ms, serial_ms / best_ms)
        sentences = (SERIAL, SENDING if tm > tc else BOUND, SPEEDUP)
        names = ("serial", "bound", "best speed-up")
        fine = True
        for place, (said, right) in enumerate(zip(answer, truth, strict=True)):
            if said is not None and close(said, right):
                continue
            fine = sheet.expect(
                sentences[place],
                False,
                seen=f"Tc = {tc} ms, Tm = {tm} ms: {names[place]} is {_said(said)}",
                expected=_expected(place, serial_ms, best_ms),
                hint=_hint(place, said, tc, tm),
            )
        if not fine and not shown:
            sheet.show(best, title=f"{tc} and {tm} ms at once: nothing is shorter")
            shown = True
    for sentence in (SERIAL, BOUND, SENDING, SPEEDUP):
        sheet.expect(sentence, True)  # only now: who breaks off has earned none


def _ask(bounds: Bounds, tc: int, tm: int) -> list[float | None]:
    try:
        wanted = "(serial, bound, speed-up)"
        return read_numbers(bounds(tc, tm), 3, "bounds", wanted)
    except ZeroDivisionError as error:
        raise ZeroDivisionError(
            f"division by zero in bounds({tc}, {tm}); one of the times may be 0"
        ) from error


def _said(said: float | None) -> str:
    return "None" if said is None else f"{said:g}"


def _expected(place: int, serial_ms: float, best_ms: float) -> str:
    if place == 0:
        return f"one after the other they took {serial_ms:g} ms"
    if place == 1:
        return f"at once they took {best_ms:g} ms"
    return f"at once they took {best_ms:g} ms, one after the other {serial_ms:g}"


def _hint(place: int, said: float | None, tc: int, tm: int) -> str:
    if said is None:
        return ""
    if place == 1:
        if tm > tc and close(said, tc):
            return "what is left of the longer side cannot hide behind the shorter"
        if close(said, min(tc, tm)):
            return "the longer of the two is always left"
        if close(said, (tc + tm) / 2):
            return "half of the sum is less than the longer side"
    if place == 2 and tc and tm:
        if close(said, 1 + tm / tc) and tm > tc:
            return "1 + Tm/Tc hides all messages, also behind nothing"
        if close(said, max(tc, tm) / (tc + tm)):
            return "a speed-up is old time over new time"
        if close(said, 100 * min(tc, tm) / (tc + tm)):
            return "a factor such as 1.5, not percent"
    return ""
