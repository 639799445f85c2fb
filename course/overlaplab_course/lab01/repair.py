"""Extra 1.9: repair a calculator that promises more than any schedule can give.

The learner's number draws five jobs; for one of them the given calculator promises a
step that is shorter than its own messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab_course.lab01.numbers import as_number, close, read_numbers
from overlaplab_course.lab01.steps import NS_PER_MS, pair_timeline

WHICH = "which job is promised a step that no schedule has"
PROMISED = "the promise, and the shortest step of that job"
SAME = "where a can be reached, the forecast is the one of before"
CAPPED = "where a cannot be reached, the step is the bound"
BEST = "the best speed-up is one that some schedule reaches"
LETTERS = ("A", "B", "C", "D", "E")

Forecast = Callable[[float, float, float], Any]


class Job(NamedTuple):
    """Times alone in ms, and the fraction `a` that somebody promises to save."""

    tc: int
    tm: int
    a: float


def broken_forecast(tc: float, tm: float, a: float) -> tuple[float, float, float]:
    """The calculator as the lesson hands it out (a test holds the two together)."""
    step = tc + (1 - a) * tm
    return step, (tc + tm) / step, 1 + tm / tc


@lru_cache(maxsize=64)
def jobs(number: int) -> Mapping[str, Job]:
    """The five jobs of a learner's number; one cannot have its a."""
    draw = random.Random(f"repair {int(number)}")
    fine = [
        Job(draw.randrange(80, 160, 10), draw.randrange(20, 70, 10), a)
        for a in (0.5, 0.9)
    ]
    # More to send than to compute, and an a that can be had all the same.
    for a in (0.25, 0.4):
        tc = draw.randrange(60, 120, 10)
        fine.append(Job(tc, tc + draw.randrange(10, 50, 10), a))
    tc = draw.randrange(40, 100, 10)
    bad = Job(tc, 2 * tc + draw.randrange(0, 60, 20), draw.choice((0.75, 0.9)))
    drawn = [*fine, bad]
    draw.shuffle(drawn)
    return dict(zip(LETTERS, drawn, strict=True))


def bad_letter(number: int) -> str:
    """The job whose promise is shorter than the bound."""
    (letter,) = (
        letter
        for letter, job in jobs(number).items()
        if broken_forecast(*job)[0] < max(job.tc, job.tm)
    )
    return letter


@lru_cache(maxsize=1)
def unseen() -> tuple[Job, ...]:
    draw = random.Random(109)
    drawn = []
    for _ in range(80):
        a = draw.randrange(0, 101) / 100
        drawn.append(Job(draw.randrange(5, 200), draw.randrange(1, 200), a))
    return (Job(100, 50, 1.0), Job(50, 100, 1.0), Job(50, 100, 0.5), *drawn)


@exercise(
    "1.9",
    title="repair: a calculator that promises too much",
    solution=("my_number", "diagnosis", "forecast"),
    verifies=(WHICH, PROMISED, SAME, CAPPED, BEST),
    points=2,
    optional=True,
    timeout_s=20.0,
)
def grade_repair(
    sheet: Sheet, my_number: int, diagnosis: Mapping[str, Any], forecast: Forecast
) -> None:
    """The diagnosis from the own jobs; the repair on many that nobody has seen."""
    if not isinstance(diagnosis, Mapping):
        raise TypeError(f"diagnosis is {type(diagnosis).__name__}; expected a dict")
    number = int(my_number)
    sheet.ran(f"your five jobs, then your forecast of {len(unseen())} others")
    letter = bad_letter(number)
    bad = jobs(number)[letter]
    said = str(diagnosis.get("job")).strip().upper()
    if said in LETTERS:
        job = jobs(number)[said]
        at_once = pair_timeline(job.tc * NS_PER_MS, job.tm * NS_PER_MS, at_once=True)
        sheet.show(at_once, title=f"job {said}, all that can be at once")
    _judge_diagnosis(sheet, diagnosis, letter, bad, max(bad.tc, bad.tm))
    for job in unseen():
        step, speed_up, best = read_numbers(
            forecast(*job), 3, "forecast", "(step, speed-up, best speed-up)"
        )
        serial = pair_timeline(
            job.tc * NS_PER_MS, job.tm * NS_PER_MS, at_once=False
        ).step_ns
        bound = pair_timeline(
            job.tc * NS_PER_MS, job.tm * NS_PER_MS, at_once=True
        ).step_ns
        formula = broken_forecast(*job)[0]
        reachable = formula >= bound / NS_PER_MS - 1e-9
        right = formula if reachable else bound / NS_PER_MS
        told = f"Tc = {job.tc} ms, Tm = {job.tm} ms, a = {job.a:g}"
        fine = (
            step is not None
            and speed_up is not None
            and close(step, right)
            and close(speed_up, serial / NS_PER_MS / right)
        )
        sheet.expect(
            SAME if reachable else CAPPED,
            fine,
            seen=f"{told}: step {_told(step)}, speed-up {_told(speed_up)}",
            expected=f"step {right:g}, speed-up {serial / NS_PER_MS / right:.4g}",
            hint=_hint(step, reachable, bound / NS_PER_MS),
        )
        sheet.expect(
            BEST,
            best is not None and close(best, serial / bound),
            seen=f"{told}: best speed-up {_told(best)}",
            expected=f"{serial / bound:.4g}: at once they take {bound / 1e6:g} ms",
            hint="behind Tc there is no room for more than Tc of messages",
        )


def _hint(step: float | None, reachable: bool, bound_ms: float) -> str:
    if not reachable:
        return "the messages alone take Tm"
    if step is not None and close(step, bound_ms):
        return "the bound is the least, not the rule: lift only a step that is under it"
    return ""


def _judge_diagnosis(
    sheet: Sheet, diagnosis: Mapping[str, Any], letter: str, bad: Job, bound_ms: float
) -> None:
    said = diagnosis.get("job")
    right = isinstance(said, str) and said.strip().upper() == letter
    seen = f"job is {said!r}"
    if isinstance(said, str) and said.strip().upper() in LETTERS:
        seen = f"{said.strip().upper()} can be had: its step is not under max(Tc, Tm)"
    sheet.expect(
        WHICH,
        right,
        seen=seen,
        expected="the letter of the one job with a promise under max(Tc, Tm)",
    )
    wrong = []
    for key, value in (
        ("promised_ms", broken_forecast(*bad)[0]),
        ("shortest_ms", bound_ms),
    ):
        number = as_number(diagnosis.get(key))
        if number is None or not abs(number - value) < 0.05:
            wrong.append(f"{key} is {diagnosis.get(key)!r}")
    sheet.expect(
        PROMISED,
        not wrong,
        seen=", ".join(wrong),
        expected="what the broken forecast says of that job, and its max(Tc, Tm)",
    )


def _told(said: float | None) -> str:
    return "None" if said is None else f"{said:.4g}"
