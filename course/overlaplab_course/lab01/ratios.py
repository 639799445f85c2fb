"""Exercise 1.4: three ratios that people mix up, computed from the same five numbers.

Times alone are those of each operator with nothing beside it, times in the run are what
its timeline shows. Without contention and gaps all agree with `Timeline.report()`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.hardware import Hardware
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01.formula import CONTENDED
from overlaplab_course.lab01.numbers import close, read_numbers
from overlaplab_course.lab01.steps import CHALK, NS_PER_MS, write_step

OVERLAP = "overlap fraction: what is hidden, of what is sent in the run"
SAVED = "saved fraction: what the step is shorter than serial, of Tm"
EFFICIENCY = "efficiency: what is saved, of what could be"
NONE = "None where there is nothing to divide by"
_SENTENCES = (OVERLAP, SAVED, EFFICIENCY)
_NAMES = ("overlap fraction", "saved fraction", "efficiency")

Ratios = Callable[[float, float, float, float, float], Any]


@dataclass(frozen=True, slots=True)
class Totals:
    """Five numbers of one run, in ms; unpacks as `ratios(*totals)`.

    Args:
        tc, tm: computation and communication, each alone.
        sent, hidden: communication in the run, and the part with computation beside it.
        step: the run.
        timeline: the run itself.
    """

    tc: float
    tm: float
    sent: float
    hidden: float
    step: float
    timeline: Timeline

    def __iter__(self) -> Any:
        return iter((self.tc, self.tm, self.sent, self.hidden, self.step))

    def right(self) -> tuple[float | None, float | None, float | None]:
        """The three ratios, by `Report`'s definitions with the times alone."""
        saved = self.tc + self.tm - self.step
        could = min(self.tc, self.tm)
        return (
            self.hidden / self.sent if self.sent else None,
            saved / self.tm if self.tm else None,
            saved / could if could else None,
        )

    def __repr__(self) -> str:
        return (
            f"alone: compute {self.tc:.1f} ms, communication {self.tm:.1f} ms\n"
            f"run:   communication {self.sent:.1f} ms, {self.hidden:.1f} of it hidden; "
            f"step {self.step:.1f} ms"
        )


def totals_of(timeline: Timeline) -> Totals:
    """Five numbers of a run of the virtual cluster; operators know their time alone."""
    report = timeline.report()
    alone = {"compute": 0, "communication": 0}
    for span in timeline.spans:
        if span.kind in alone and span.rank == report.rank:
            alone[span.kind] += span.attributes.get("alone_ns", span.duration_ns)
    return Totals(
        alone["compute"] / NS_PER_MS,
        alone["communication"] / NS_PER_MS,
        report.communication_ns / NS_PER_MS,
        report.hidden_ns / NS_PER_MS,
        report.step_ns / NS_PER_MS,
        timeline,
    )


def contended() -> Totals:
    """The lesson's run: the opening step where the two slow each other down."""
    return opening(CONTENDED)


@lru_cache(maxsize=1)
def uncontended() -> Totals:
    """The opening step as it was; a test holds it to the recorded one."""
    return opening(CHALK)


def opening(hardware: Hardware) -> Totals:
    """The step of section 1, written, a message a layer."""
    program = write_step(
        [6 * NS_PER_MS] * 10,
        [5 * NS_PER_MS] * 10,
        forward_ns=30 * NS_PER_MS,
        update_ns=10 * NS_PER_MS,
    )
    return totals_of(resolve(program, hardware))


@lru_cache(maxsize=1)
def unseen() -> tuple[Totals, ...]:
    """Runs to try a function on: with and without contention, gaps, either side."""
    draw = random.Random(104)
    found = []
    for _ in range(60):
        number = draw.randrange(1, 8)
        layers = [draw.randrange(1, 9) * NS_PER_MS for _ in range(number)]
        messages = [draw.randrange(1, 12) * NS_PER_MS for _ in range(number)]
        program = write_step(
            layers,
            messages,
            per_bucket=draw.randrange(1, 4),
            forward_ns=draw.randrange(0, 9) * NS_PER_MS,
            update_ns=draw.randrange(0, 5) * NS_PER_MS,
        )
        launching = replace(CHALK, launch_ns=draw.randrange(1, 9) * NS_PER_MS)
        hardware = draw.choice((CHALK, CONTENDED, launching))
        found.append(totals_of(resolve(program, hardware)))
    return tuple(found)


@lru_cache(maxsize=1)
def one_sided() -> tuple[Totals, ...]:
    """Nothing to send; nothing to compute; neither."""
    ms = NS_PER_MS
    computing = resolve(write_step([5 * ms] * 4, [0] * 4, per_bucket=4), CHALK)
    only = computing.where(lambda s: s.kind == "compute")
    sending = resolve(write_step([0] * 4, [7 * ms] * 4), CHALK)
    wire = sending.where(lambda s: s.kind == "communication")
    return totals_of(only), totals_of(wire), totals_of(Timeline.of(()))


@exercise(
    "1.4",
    title="three ratios",
    solution="ratios",
    verifies=(*_SENTENCES, NONE),
    points=2,
    timeout_s=20.0,
)
def grade_ratios(sheet: Sheet, ratios: Ratios) -> None:
    """Each ratio on the lesson's run and on unseen ones; then the empty sides."""
    runs = (contended(), *unseen())
    sheet.ran(f"ratios on {len(runs)} runs; then on three with a side missing")
    shown = False
    for totals in runs:
        answer = _ask(ratios, totals)
        for place, (said, right) in enumerate(zip(answer, totals.right(), strict=True)):
            assert right is not None
            fine = sheet.expect(
                _SENTENCES[place],
                said is not None and close(said, right),
                seen=f"{totals}\n{_NAMES[place]} is {_told(said)}",
                expected=_HOW[place],
                hint=_hint(place, said, totals),
            )
            if not fine and not shown:
                sheet.show(totals.timeline, title="the run on which it is wrong")
                shown = True
    sheet.stop_if_wrong()
    for totals in one_sided():
        answer = _ask(ratios, totals)
        right_ones = totals.right()
        wrong = [
            f"{name} is {_told(said)}"
            for name, said, right in zip(_NAMES, answer, right_ones, strict=True)
            if (said is None) != (right is None)
            or (said is not None and right is not None and not close(said, right))
        ]
        sheet.expect(
            NONE,
            not wrong,
            seen=f"{totals}\n" + "\n".join(wrong),
            expected="None for each ratio whose denominator is 0, and only for those",
            hint="efficiency divides by what could be saved: the shorter of Tc and Tm",
        )


def _ask(ratios: Ratios, totals: Totals) -> list[float | None]:
    wanted = "(overlap fraction, saved fraction, efficiency)"
    try:
        return read_numbers(ratios(*totals), 3, "ratios", wanted)
    except ZeroDivisionError as error:
        raise ZeroDivisionError(
            f"division by zero in ratios{tuple(totals)}; expected None for that ratio"
        ) from error


def _told(said: float | None) -> str:
    return "None" if said is None else f"{said:.3f}"


_HOW = (
    "hidden / sent: both are of the run",
    "(tc + tm - step) / tm: both times alone",
    "(tc + tm - step) / (serial - bound): what could be saved is what the bound leaves",
)


def _hint(place: int, said: float | None, totals: Totals) -> str:
    if said is None:
        return ""
    right = totals.right()
    this = right[place]
    if this is not None and this < 0 and said == 0:
        return "a run can be slower than serial: then saved is less than 0"
    if right[0] is not None and close(said, right[0]):
        return "hidden is not saved: beside each other both may take longer"
    if place and right[place - 1] is not None and close(said, float(right[place - 1])):  # type: ignore[arg-type]
        return f"that is the {_NAMES[place - 1]}"
    if place == 0 and totals.tm and close(said, totals.hidden / totals.tm):
        return "hidden is time of the run, so it is compared with what the run sent"
    if place == 2 and close(said, (totals.tc + totals.tm - totals.step) / totals.tc):
        return "where Tm is the shorter, no more than Tm can be saved"
    if right[place] is not None and close(said, 100 * float(right[place])):  # type: ignore[arg-type]
        return "a fraction, not percent"
    return ""
