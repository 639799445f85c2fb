"""Exercise 1.3: where T = Tc + (1 - a) Tm holds, and what breaks it where it does not.

Four cards, shuffled and sized by the learner's number: three runs and a promise. Times
alone come from the same step with everything one after the other on a GPU that does
nothing else; the overlap fraction from the run itself, as a profiler would say it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.hardware import Hardware
from overlaplab.program import Program, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01.numbers import as_number, close
from overlaplab_course.lab01.steps import CHALK, NS_PER_MS, write_step

HOLDS, CONTENTION, IDLE = "holds", "contention", "idle"
IMPOSSIBLE = "impossible"
WHYS = (HOLDS, CONTENTION, IDLE, IMPOSSIBLE)
LETTERS = ("A", "B", "C", "D")
FORMULA = "what the formula says for each card"
_SENTENCES: Mapping[str, str] = {
    HOLDS: "on which card it holds",
    CONTENTION: "where the two slow each other down",
    IDLE: "where somebody has nothing to do",
    IMPOSSIBLE: "where it promises what no schedule can reach",
}


def with_contention(hardware: Hardware) -> Hardware:
    """`hardware` on which computing and sending slow each other, as on two H200s."""
    return replace(
        hardware,
        name=f"{hardware.name} with contention",
        compute_rate_permille=600,
        wire_rate_permille=500,
    )


CONTENDED = with_contention(CHALK)
_LAUNCH_SHARE = 1.25  # a launch takes so many times the operator that it launches


@dataclass(frozen=True, slots=True)
class Card:
    """One use of the formula.

    Args:
        tc_ms, tm_ms: computation and communication, each alone.
        a: the overlap fraction: hidden / communication of the run, or as promised.
        timeline: the run; None for a promise.
        why: the answer.
    """

    tc_ms: float
    tm_ms: float
    a: float
    timeline: Timeline | None
    why: str

    @property
    def formula_ms(self) -> float:
        return self.tc_ms + (1 - self.a) * self.tm_ms

    def __repr__(self) -> str:
        told = (
            f"Tc = {self.tc_ms:g} ms and Tm = {self.tm_ms:g} ms alone, a = {self.a:.3f}"
        )
        if self.timeline is None:
            return f"{told};\n   a promise: nobody has run it"
        report = self.timeline.report()
        return (
            f"{told};\n   the run took {report.step_ns / NS_PER_MS:.1f} ms; in it "
            f"{report.compute_ns / NS_PER_MS:.1f} ms of computing, "
            f"{report.communication_ns / NS_PER_MS:.1f} of messages"
        )


@lru_cache(maxsize=32)
def cards(number: int) -> Mapping[str, Card]:
    """The four cards of a learner's number, by letter."""
    draw = random.Random(f"formula {int(number)}")
    layers = draw.choice((6, 8, 10))
    layer_ms = draw.choice((6, 8, 10))
    message_ms = layer_ms - draw.choice((2, 3))
    forward_ms = layers * layer_ms // 2
    program = write_step(
        [layer_ms * NS_PER_MS] * layers,
        [message_ms * NS_PER_MS] * layers,
        forward_ns=forward_ms * NS_PER_MS,
        forward_pieces=layers,
    )
    # On a GPU whose CPU is the slower: a launch takes longer than a layer.
    slow_launch = replace(
        CHALK,
        name="chalk with slow launches",
        launch_ns=round(_LAUNCH_SHARE * layer_ms * NS_PER_MS),
    )
    found = [
        _run(program, CHALK, HOLDS),
        _run(program, CONTENDED, CONTENTION),
        _run(program, slow_launch, IDLE),
        _promise(draw),
    ]
    draw.shuffle(found)
    return dict(zip(LETTERS, found, strict=True))


def _run(program: Program, hardware: Hardware, why: str) -> Card:
    alone = resolve(program, CHALK).report()
    timeline = resolve(program, hardware)
    a = timeline.report().overlap_fraction
    assert a is not None
    return Card(
        alone.compute_ns / NS_PER_MS,
        alone.communication_ns / NS_PER_MS,
        round(a, 3),
        timeline,
        why,
    )


def _promise(draw: random.Random) -> Card:
    tc = draw.choice((30, 40, 50))
    tm = tc + draw.choice((30, 50, 60))
    return Card(tc, tm, draw.choice((0.8, 0.9)), None, IMPOSSIBLE)


@exercise(
    "1.3",
    title="where the formula stops",
    solution=("my_number", "reading"),
    verifies=(FORMULA, *_SENTENCES.values()),
    points=2,
    timeout_s=20.0,
)
def grade_formula(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Numbers first; then each card's diagnosis, by its own sentence."""
    if not isinstance(reading, Mapping):
        raise TypeError(f"reading is {type(reading).__name__}; expected a dict")
    given = cards(int(my_number))
    sheet.ran("the runs of your cards again, and the formula for each")
    wrong = []
    for letter, card in given.items():
        entry = reading.get(letter)
        typed = entry.get("formula_ms") if isinstance(entry, Mapping) else None
        said = as_number(typed)
        if said is None:
            wrong.append(f"{letter}: formula_ms is {typed!r}")
        elif abs(said - card.formula_ms) > 0.15:
            wrong.append(f"{letter}: {said:g} ms{_slip(card, said)}")
    sheet.expect(
        FORMULA,
        not wrong,
        seen="\n".join(wrong),
        expected="Tc + (1 - a) * Tm, in ms, to within 0.15",
    )
    shown = False
    for letter, card in given.items():
        entry = reading.get(letter)
        why = entry.get("verdict") if isinstance(entry, Mapping) else None
        right = isinstance(why, str) and why.strip().casefold() == card.why
        known = isinstance(why, str) and why.strip().casefold() in WHYS
        if not right and not shown and card.timeline is not None:
            sheet.show(card.timeline, title=f"card {letter}")
            shown = True
        sheet.expect(
            _SENTENCES[card.why],
            right,
            seen=f"{letter}: you say {why!r}; {_seen(card)}",
            expected="the word that the numbers beside it call for"
            if known
            else f"one of {', '.join(WHYS)}",
            hint=_HINTS[card.why] if known else "",
        )


def _slip(card: Card, said: float) -> str:
    if close(said, card.tc_ms + card.a * card.tm_ms):
        return ": that takes a in the place of 1 - a"
    if card.timeline and abs(said - card.timeline.step_ns / NS_PER_MS) < 0.15:
        return ": that is what the run took, not what the formula says"
    if close(said, max(card.tc_ms, card.tm_ms)):
        return ": that is the bound, not the formula"
    if abs(said - card.formula_ms) <= 0.51:
        return ": give it to one decimal"
    return ""


def _seen(card: Card) -> str:
    """The numbers that decide."""
    says = f"the formula says {card.formula_ms:.1f} ms"
    if card.timeline is None:
        return f"{says}, and Tm alone is {card.tm_ms:g} ms"
    report = card.timeline.report()
    took = f"the run took {report.step_ns / NS_PER_MS:.1f}"
    computes = f"in it the GPU computes for {report.compute_ns / NS_PER_MS:.1f} ms"
    busy_ns = report.compute_ns + report.exposed_ns
    neither = f"for {(report.step_ns - busy_ns) / NS_PER_MS:.1f} neither side works"
    return f"{says}, {took}; {computes} (alone {card.tc_ms:g}), {neither}"


_HINTS: Mapping[str, str] = {
    HOLDS: "the formula's number is the run's: nothing is left to explain",
    CONTENTION: "alone the GPU computes for a shorter time than in the run",
    IDLE: "the times alone count work only: what of a time in which nothing runs?",
    IMPOSSIBLE: "a step is at least as long as its messages are",
}
