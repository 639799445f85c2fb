"""Exercise 1.5: ten layers, by hand and as a function: when does each bucket travel?

Truth is the resolver's. A wrong message is charged to what decides it in truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.lab01.numbers import said_timeline
from overlaplab.grading.lab01.steps import CHALK, NS_PER_MS, write_step
from overlaplab.program import resolve

COUNT = "each layer travels once: one message a bucket, the last one with the rest"
READY = "with the wire free, a message starts when its last layer is through"
BUSY = "behind another message, it starts when that one has ended"
LENGTH = "a message takes as long as its layers' messages together"

Case = tuple[int, int, int, int]
Schedule = Callable[[int, int, int, int], Any]
LESSON: Case = (10, 5, 3, 2)


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
    faults: dict[str, tuple[str, str]] = {}
    for number, case in enumerate(cases()):
        pairs = _pairs(schedule, case)
        truth = resolved(*case)
        if number == 0:
            _show(sheet, case, pairs, "your ten layers, two a message")
        fault = _fault(case, pairs, truth)
        if fault is None:
            continue
        sentence, seen, expected = fault
        if sentence not in faults:
            if not faults and number:
                _show(sheet, case, pairs, f"by you: {_told(case)}")
            faults[sentence] = (f"{_told(case)}: {seen}", expected)
    for sentence in (COUNT, LENGTH, READY, BUSY):
        if sentence in faults:
            seen, expected = faults[sentence]
            sheet.expect(
                sentence, False, seen=seen, expected=expected, hint=_HINTS[sentence]
            )
        elif not faults:
            sheet.expect(sentence, True)


def _show(
    sheet: Sheet, case: Case, pairs: list[tuple[float, float]], title: str
) -> None:
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
) -> tuple[str, str, str] | None:
    """(sentence, seen, expected) of the first wrong message, None if all are right."""
    num_layers, layer_ms, message_ms, per_bucket = case
    if len(pairs) != len(truth):
        rest = num_layers % per_bucket
        return (
            COUNT,
            f"{len(pairs)} messages",
            f"{len(truth)}"
            + (
                f", the last one with {rest} of the {num_layers} layers" if rest else ""
            ),
        )
    before = 0.0
    for place, (said, right) in enumerate(zip(pairs, truth, strict=True)):
        seen = f"message {place} from {said[0]:g} to {said[1]:g} ms"
        layers = min(num_layers, (place + 1) * per_bucket) - place * per_bucket
        start_wrong = abs(said[0] - right[0]) > 1e-6
        length = said[1] - said[0]
        if abs(length - layers * message_ms) > 1e-6:
            told = (
                f"{layers} of {message_ms} ms each"
                if layers > 1
                else f"{message_ms} ms"
            )
            return (
                LENGTH,
                f"{seen}: {length:g} ms long",
                f"{layers * message_ms}: {told}",
            )
        if start_wrong and right[0] == before and place:
            return BUSY, seen, f"the message before it ends at {before:g} ms"
        if start_wrong:
            through = min(num_layers, (place + 1) * per_bucket)
            return READY, seen, f"its last layer is through at {through * layer_ms} ms"
        before = right[1]
    return None


def _told(case: Case) -> str:
    num_layers, layer_ms, message_ms, per_bucket = case
    return (
        f"{num_layers} layers of {layer_ms} ms, {message_ms} ms of message each, "
        f"{per_bucket} a bucket"
    )


_HINTS = {
    COUNT: "if the layers do not divide, a smaller bucket is left at the end",
    LENGTH: "message_ms is for one layer; how many layers are in this bucket?",
    READY: "bucket 0 has the layers that come first in the backward pass: it "
    "is through after per_bucket of them",
    BUSY: "the wire sends one message at a time: max() of two times",
}
