"""Exercise 0.1: when does each launch start?

The learner gives a function, or the table of the own six launches. Truth is what
`ol.resolve` says. A wrong row is charged to what holds it in truth, so that a forgotten
rule is refused by its own sentence. What comes after the first wrong row follows from
it: a rule is called right only where rows before it show so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.span import Kind
from overlaplab_course.lab00.launches import (
    CPU,
    LAUNCH_US,
    Launch,
    Launches,
    Reason,
    Row,
    resolved,
    six_launches,
    unseen,
)

LAUNCH = "with its stream free, an operator starts when its launch has ended"
STREAM = "behind another in its stream, it starts when that one has ended"
WAIT = "an operator that waits starts when what it waits for has ended"
SYNC = "a host sync holds the CPU until then, and costs no launch"
_SENTENCES: Mapping[Reason, str] = {
    "launch": LAUNCH,
    "stream": STREAM,
    "wait": WAIT,
    "sync": SYNC,
}
_HINTS: Mapping[Reason, str] = {
    "launch": "keep the time of the CPU in a variable: each launch adds its cost",
    "stream": "keep the end of the last operator of each stream",
    "wait": "max() of everything that must have ended",
    "sync": "the CPU's time becomes the end of what it waits for, if that is later",
}

Schedule = Callable[[Sequence[Launch], int], Any]
Pairs = list[tuple[float, float]]


@exercise(
    "0.1",
    title="when does it start?",
    solution=("my_number", "schedule"),
    verifies=(LAUNCH, STREAM, WAIT, SYNC),
    points=2,
    timeout_s=20.0,
)
def grade_schedule(
    sheet: Sheet, my_number: int, schedule: Schedule | Sequence[Any]
) -> None:
    """Own launches first, then (for a function) many that nobody has seen."""
    programs = [(six_launches(my_number), LAUNCH_US)]
    if callable(schedule):
        programs += unseen()
        sheet.ran(f"your six launches and {len(programs) - 1} other programs")
    else:
        sheet.ran("your six launches")
        sheet.note("a table is right for these six only; a function for any")
    faults: dict[str, tuple[str, str, Reason]] = {}
    shown: set[Reason] = set()  # rules of right rows, before the first wrong one
    left_open: set[Reason] = set()  # rules of the rows from there on
    for number, (launches, launch_us) in enumerate(programs):
        pairs = _pairs(schedule, launches, launch_us)
        if number == 0:
            sheet.show(said_timeline(launches, launch_us, pairs))
        rows = resolved(launches, launch_us)
        wrong = _first_wrong(rows, pairs)
        shown |= {row.reason for row in rows[:wrong]}
        left_open |= {row.reason for row in rows[wrong:]}
        if wrong == len(rows):
            continue
        fault = _fault(launches, rows, launch_us, pairs, wrong)
        sentence, seen, expected, reason = fault
        if sentence in faults:
            continue
        if number:
            table = f"{launches!r}\na launch costs {launch_us} us"
            seen = f"in another program:\n{table}\n{seen}"
            if not faults:
                sheet.show(
                    said_timeline(launches, launch_us, pairs),
                    title="that program, by you",
                )
        faults[sentence] = (seen, expected, reason)
    # Six rows show little: of a table, a rule holds if none of its rows is left open.
    held = shown if callable(schedule) else shown - left_open
    for reason, sentence in _SENTENCES.items():
        if sentence in faults:
            seen, expected, _ = faults[sentence]
            hint = _HINTS[reason]
            sheet.expect(sentence, False, seen=seen, expected=expected, hint=hint)
        elif not faults or reason in held:
            sheet.expect(sentence, True)


def _pairs(
    schedule: Schedule | Sequence[Any], launches: Launches, launch_us: int
) -> Pairs:
    """What the learner says, as numbers.

    Raises:
        ValueError: not a pair of numbers for each line.
    """
    said = schedule(Launches(launches), launch_us) if callable(schedule) else schedule
    try:
        pairs = [(float(start), float(end)) for start, end in said]
        if not all(math.isfinite(start + end) for start, end in pairs):
            raise ValueError("not finite")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the schedule is {said!r:.200}; expected a list of {len(launches)} pairs "
            "(start, end) in us"
        ) from error
    if len(pairs) != len(launches):
        raise ValueError(
            f"the schedule has {len(pairs)} pairs; expected {len(launches)}, one for "
            "each line (the host sync too)"
        )
    return pairs


def _first_wrong(rows: Sequence[Row], pairs: Pairs) -> int:
    """The position of the first wrong row; `len(rows)` if all are right."""
    for position, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
        if pair != (row.start_us, row.end_us):
            return position
    return len(rows)


def _fault(
    launches: Launches, rows: Sequence[Row], launch_us: int, pairs: Pairs, position: int
) -> tuple[str, str, str, Reason]:
    """(sentence, seen, expected, reason) of a wrong row."""
    row, line, pair = rows[position], launches[position], pairs[position]
    reason: Reason = row.reason
    if reason == "launch" and any(x.stream == CPU for x in launches[:position]):
        reason = "sync"  # its launch came when the CPU was free again
    seen = f"line {position} ({line.name}): {pair[0]:g} to {pair[1]:g} us"
    why = _why(launches, rows, launch_us, position)
    expected = f"{row.start_us} to {row.end_us} us: {why}"
    return _SENTENCES[reason], seen, expected, reason


def _why(launches: Launches, rows: Sequence[Row], launch_us: int, position: int) -> str:
    """What held a row, in words."""
    row, line = rows[position], launches[position]
    if line.stream == CPU:
        return "the CPU comes to it then, and goes on when what it waits for has ended"
    if row.reason == "launch":
        return f"its launch ends at {row.start_us} us, and nothing else holds it"
    if row.reason == "stream":
        before = [i for i in range(position) if launches[i].stream == line.stream]
        return f"line {before[-1]} of its stream ends then"
    last = max(line.waits, key=lambda w: rows[w].end_us)
    return f"line {last}, for which it waits, ends then"


def said_timeline(launches: Sequence[Launch], launch_us: int, pairs: Pairs) -> Timeline:
    """What the learner says, to be drawn; an end before its start becomes a mark.

    An operator that would run beside another of its stream has a lane of its own, so
    that neither hides the other. The launches of the CPU lane are ours: from 0, and on
    from where the learner lets a host sync end.
    """
    spans = []
    cpu_us = 0.0
    lane_end_us: dict[str, float] = {}
    for line, (start_us, end_us) in zip(launches, pairs, strict=True):
        end_us = max(start_us, end_us)
        if line.stream == CPU:
            spans.append(_span("cpu", "host", f"wait {line.name}", start_us, end_us))
            cpu_us = max(cpu_us, end_us)
            continue
        launched_us = cpu_us + launch_us
        spans.append(_span("cpu", "launch", f"launch {line.name}", cpu_us, launched_us))
        cpu_us = launched_us
        kind: Kind = "memcpy" if line.stream == "copy" else "compute"
        lane = line.stream
        if start_us < lane_end_us.get(lane, start_us):
            lane = f"{lane}, at once"
        lane_end_us[lane] = max(end_us, lane_end_us.get(lane, end_us))
        spans.append(_span(lane, kind, line.name, start_us, end_us))
    return Timeline.of(spans)


def _span(lane: str, kind: Kind, name: str, start_us: float, end_us: float) -> Span:
    return Span(0, lane, kind, name, round(1000 * start_us), round(1000 * end_us))
