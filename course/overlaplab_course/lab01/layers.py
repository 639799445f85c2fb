"""Exercise 1.5: ten layers, by hand and as a function: when does each bucket travel?

Truth is the resolver's. A wrong message is charged to what decides it in truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.program import resolve
from overlaplab_course.lab01.numbers import said_timeline
from overlaplab_course.lab01.steps import CHALK, NS_PER_MS, write_step

COUNT = "each layer travels once: one message a bucket, the last one with the rest"
READY = "with the wire free, a message starts when its last layer is through"
BUSY = "behind another message, it starts when that one has ended"
LENGTH = "a message takes as long as its layers' messages together"

Case = tuple[int, int, int, int]
Schedule = Callable[[int, int, int, int], Any]
LESSON: Case = (10, 5, 3, 2)


class Fault(NamedTuple):
    """The first message of a case that breaks a rule."""

    case: Case
    sentence: str
    seen: str
    expected: str
    hint: str


@lru_cache(maxsize=512)
def resolved(
    num_layers: int, layer_ms: int, message_ms: int, per_bucket: int
) -> tuple[tuple[float, float], ...]:
    """(start, end) of each message in ms from the start of the backward pass."""
    program = write_step(
        [layer_ms * NS_PER_MS] * num_layers,
        [message_ms * NS_PER_MS] * num_layers,
        per_bucket=per_bucket,
    )
    return tuple(
        (span.start_ns / NS_PER_MS, span.end_ns / NS_PER_MS)
        for span in resolve(program, CHALK).spans
        if span.kind == "communication"
    )


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """The lesson's, three of its kind, then many; short ones first."""
    draw = random.Random(105)
    many = [
        (draw.randrange(1, 25), draw.randrange(1, 9), draw.randrange(1, 12),
         draw.randrange(1, 7))
        for _ in range(150)
    ]  # fmt: skip
    many.sort(key=lambda case: case[0])
    return (LESSON, (10, 5, 3, 10), (10, 5, 3, 3), (4, 2, 5, 1), *many)


def step_and_hidden(
    pairs: Iterable[tuple[float, float]], backward_ms: float
) -> tuple[float, float]:
    """The step, and what of the messages lies within the backward pass.

    Both from the start of the backward pass, for messages that do not overlap.
    """
    pairs = list(pairs)
    step = max([backward_ms, *(end for _, end in pairs)])
    hidden = sum(max(0, min(end, backward_ms) - start) for start, end in pairs)
    return step, hidden


@exercise(
    "1.5",
    title="ten layers",
    solution="schedule",
    verifies=(COUNT, LENGTH, READY, BUSY),
    points=3,
    timeout_s=30.0,
)
def grade_layers(sheet: Sheet, schedule: Schedule) -> None:
    """The lesson's case is drawn; the first wrong message of each kind is told."""
    sheet.ran(f"the ten layers, then {len(cases()) - 1} other backward passes")
    faults: dict[str, Fault] = {}
    for number, case in enumerate(cases()):
        pairs = _pairs(schedule, case)
        truth = resolved(*case)
        if number == 0:
            _show(sheet, case, pairs, "your ten layers, two a message")
        fault = _fault(case, pairs, truth)
        if fault is None:
            continue
        if fault.sentence not in faults:
            if not faults and number:
                _show(sheet, case, pairs, f"by you: {_told(case)}")
            faults[fault.sentence] = fault
    for sentence in (COUNT, LENGTH, READY, BUSY):
        if sentence in faults:
            fault = faults[sentence]
            sheet.expect(
                sentence,
                False,
                seen=f"{_told(fault.case)}: {fault.seen}",
                expected=fault.expected,
                hint=fault.hint,
            )
        elif not faults:
            sheet.expect(sentence, True)


def _show(
    sheet: Sheet, case: Case, pairs: list[tuple[float, float]], title: str
) -> None:
    if any(end < start for start, end in pairs):
        return  # nothing that a wire could do
    num_layers, layer_ms, _, _ = case
    right_ns = round(
        max(num_layers * layer_ms, *(end for _, end in resolved(*case))) * NS_PER_MS
    )
    step, _ = step_and_hidden(pairs, num_layers * layer_ms)
    sheet.show(
        said_timeline(num_layers * layer_ms, layer_ms, pairs),
        step_ns=round(step * NS_PER_MS),
        target_ns=right_ns,
        title=title,
    )


def _pairs(schedule: Schedule, case: Case) -> list[tuple[float, float]]:
    """What the learner says, as numbers.

    Raises:
        ValueError: no list of pairs of numbers.
    """
    said = schedule(*case)
    try:
        pairs = [(float(start), float(end)) for start, end in said]
        if any(start + end != start + end or end - start > 1e9 for start, end in pairs):
            raise ValueError("not finite")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"schedule{case} returned {said!r:.200}; expected a list of pairs "
            "(start, end) in ms, one for each message"
        ) from error
    return pairs


def _fault(
    case: Case, pairs: list[tuple[float, float]], truth: tuple[tuple[float, float], ...]
) -> Fault | None:
    """The first wrong message, None if all are right."""
    num_layers, layer_ms, message_ms, per_bucket = case
    if len(pairs) != len(truth):
        rest = num_layers % per_bucket
        last = f", the last one with {rest} of the {num_layers} layers" if rest else ""
        hint = "if the layers do not divide, a smaller bucket is left at the end"
        seen = _count(len(pairs), "message")
        return Fault(case, COUNT, seen, f"{len(truth)}{last}", hint)
    before = 0.0
    for place, (said, right) in enumerate(zip(pairs, truth, strict=True)):
        seen = f"message {place} from {said[0]:g} to {said[1]:g} ms"
        through = min(num_layers, (place + 1) * per_bucket)
        layers = through - place * per_bucket
        length = said[1] - said[0]
        if abs(length - layers * message_ms) > 1e-6:
            return Fault(
                case,
                LENGTH,
                f"{seen}: {length:g} ms long",
                f"{layers * message_ms} ms: {_count(layers, 'layer')} of "
                f"{message_ms} ms{' each' if layers > 1 else ''}",
                _length_hint(case, place, layers, said),
            )
        if abs(said[0] - right[0]) > 1e-6:
            if right[0] == before and place:
                expected = f"the message before it ends at {before:g} ms"
                hint = "the wire sends one message at a time: max() of two times"
                return Fault(case, BUSY, seen, expected, hint)
            expected = f"its last layer is through at {through * layer_ms} ms"
            hint = _start_hint(place, late=said[0] > right[0])
            return Fault(case, READY, seen, expected, hint)
        before = right[1]
    return None


def _length_hint(case: Case, place: int, layers: int, said: tuple[float, float]) -> str:
    num_layers, _, message_ms, per_bucket = case
    if abs(said[1] - layers * message_ms) < 1e-6:
        return "the second number of a pair is the end of the message, not its length"
    full = abs(said[1] - said[0] - per_bucket * message_ms) < 1e-6
    if full and layers < per_bucket:
        verb = "is" if layers == 1 else "are"
        return f"{layers} of {num_layers} layers {verb} left for message {place}"
    return "message_ms is for one layer; how many layers are in this bucket?"


def _start_hint(place: int, *, late: bool) -> str:
    if place and late:
        return (
            "the backward pass does not wait for the wire: while a message travels, "
            "the next layers are computed"
        )
    return (
        f"bucket {place} leaves when the backward pass is through with "
        f"{'per_bucket' if not place else f'{place + 1} * per_bucket'} layers"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _told(case: Case) -> str:
    num_layers, layer_ms, message_ms, per_bucket = case
    return (
        f"{num_layers} layers of {layer_ms} ms, {message_ms} ms of message each, "
        f"{per_bucket} a bucket"
    )
