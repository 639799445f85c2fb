"""The graders of lab 00 of what is said of programs: 0.0 to 0.2, 0.5 and 0.6."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from overlaplab.cluster.run import run
from overlaplab.grading import forms, laws
from overlaplab.grading.exercise import Sheet
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab00 import given
from overlaplab_course.lab00.checks_runs import LAB  # it registers 0.3 and 0.4
from overlaplab_course.lab00.given import BORDER_AT, GPU, SHORTER, count, turn
from overlaplab_course.lab00.launches import (
    CPU,
    LAUNCH_US,
    Launch,
    Launches,
    Reason,
    as_program,
    draw,
    own_products,
    resolved,
    six_launches,
)

# 0.0: two numbers; the learner's own number draws how many products, and how long.

RETURNS, FINISHES = LAB.sentences("0.0")


@LAB.grader("0.0")
def grade_times(sheet: Sheet, my_number: int, times: Mapping[str, Any]) -> None:
    """Each number alone; a wrong one is described by what ends at that moment."""
    forms.need_dict(times, "times")
    products = own_products(my_number)
    sheet.ran(f"your {products.number} products")
    line = Launch("mm", "default", products.each_us)
    timeline = resolve(as_program([line] * products.number), GPU)
    sheet.show(timeline, title="your products")
    returns_us = given.last_launch_ns(timeline) / 1000
    right = {"returns_us": returns_us, "finishes_us": timeline.end_ns / 1000}
    kernels_us = products.number * products.each_us
    others = {
        "returns": returns_us,
        "finishes": right["finishes_us"],
        "first": LAUNCH_US,
        "last_begins": returns_us - LAUNCH_US,
        "kernels": kernels_us,
        "in_turn": returns_us + kernels_us,
        "last_alone": returns_us + products.each_us,
    }
    forms.judge_numbers(sheet, LAB.tables("0.0"), times, right, others)


# 0.1: a function, or the table of the own six launches. A wrong row is charged to what
# holds it in truth, so that a forgotten rule is refused by its own sentence. Of a table
# as many rows are judged as there are; it passes with all. What comes
# after the first wrong row follows from it: a rule is called right only where rows
# before it show so.

LAUNCH, STREAM, WAIT, SYNC = LAB.sentences("0.1")
RULES = {one["rule"]: one for one in LAB.tables("0.1")}
_LENGTH = "an end is the start plus what the operator takes"
_HELD_UP = (
    "only a host sync holds the CPU: it launches on while operators wait in streams"
)
Schedule = Callable[[Sequence[Launch], int], Any]
Pairs = list[tuple[float, float]]


@lru_cache(maxsize=1)
def unseen() -> tuple[tuple[Launches, int], ...]:
    """Programs, and what a launch costs, to try a function on; short ones first."""
    generator = random.Random(2026)
    programs = [
        (draw(generator, generator.randrange(1, 12)), generator.randrange(1, 20))
        for _ in range(150)
    ]
    return tuple(sorted(programs, key=lambda program: len(program[0])))


@LAB.grader("0.1")
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
    faults: dict[Reason, tuple[str, str, str]] = {}  # seen, expected, hint
    shown: set[Reason] = set()  # rules of right rows, before the first wrong one
    left_open: set[Reason] = set()  # rules of the rows from there on
    for number, (launches, launch_us) in enumerate(programs):
        pairs = _pairs(schedule, launches, launch_us)
        if number == 0:
            drawn = draw_pairs(launches[: len(pairs)], launch_us, pairs)
            sheet.show(drawn if pairs else None)
        rows = resolved(launches, launch_us)
        right = [pair == row[:2] for pair, row in zip(pairs, rows, strict=False)]
        wrong = right.index(False) if False in right else len(right)
        shown |= {row.reason for row in rows[:wrong]}
        left_open |= {row.reason for row in rows[wrong:]}
        if wrong == len(rows):
            continue
        if wrong == len(right):
            raise ValueError(_so_far(launches, wrong))
        line, row, (start_us, end_us) = launches[wrong], rows[wrong], pairs[wrong]
        reason = row.reason
        if reason == "launch" and any(x.stream == CPU for x in launches[:wrong]):
            reason = "sync"  # its launch came when the CPU was free again
        if reason in faults:
            continue
        seen = f"line {wrong} ({line.name}): {start_us:g} to {end_us:g} us"
        late = start_us > row.start_us
        long = start_us == row.start_us and line.stream != CPU
        if long and any(hint == _LENGTH for *_, hint in faults.values()):
            continue
        if number:
            table = f"{launches!r}\na launch costs {launch_us} us"
            seen = f"{seen}\nin another program:\n{table}"
            if not faults:
                drawn = draw_pairs(launches, launch_us, pairs)
                sheet.show(drawn, title="that program, by you")
        before = [i for i in range(wrong) if launches[i].stream == line.stream]
        if row.reason == "wait":
            before = sorted(line.waits, key=lambda i: rows[i].end_us)
        why = RULES[row.reason]["why"].format(
            start_us=row.start_us, holder=before[-1] if before else ""
        )
        hint = ""
        if long:
            hint, why = _LENGTH, f"it takes {row.end_us - row.start_us} us"
        elif late and reason in ("launch", "sync") and line.stream != CPU:
            hint = _HELD_UP
        faults[reason] = seen, f"{row.start_us} to {row.end_us} us: {why}", hint
    # Six rows show little: of a table, a rule holds if none of its rows is left open.
    held = shown if callable(schedule) else shown - left_open
    for reason, rule in RULES.items():
        if reason in faults:
            seen, expected, hint = faults[reason]
            sheet.expect(rule["says"], False, seen=seen, expected=expected, hint=hint)
        elif not faults or reason in held:
            sheet.expect(rule["says"], True)


def _pairs(
    schedule: Schedule | Sequence[Any], launches: Launches, launch_us: int
) -> Pairs:
    """What the learner says; at most one pair for each line, or a ValueError."""
    said = schedule(Launches(launches), launch_us) if callable(schedule) else schedule
    wanted = f"{len(launches)} pairs (start, end) in us"
    pairs = forms.read_pairs(said, "the schedule is", wanted)
    if len(pairs) > len(launches) or (
        callable(schedule) and len(pairs) < len(launches)
    ):
        raise ValueError(
            f"the schedule has {len(pairs)} pairs; expected {len(launches)}, one for "
            "each line (the host sync too)"
        )
    return pairs


def _so_far(launches: Sequence[Launch], number: int) -> str:
    """Of a table whose first rows are right: which line comes next."""
    done = f"{number} of {len(launches)} rows so far" + (
        ", all right" if number else ""
    )
    return f"{done}. Next: line {number} ({launches[number].name})"


def draw_pairs(launches: Sequence[Launch], launch_us: int, pairs: Pairs) -> Timeline:
    """What the learner says, as a timeline.

    The launches of the CPU lane are ours: from 0, and on from where the learner lets a
    host sync end.
    """
    spans: list[Any] = []
    cpu_us = 0.0
    for (name, stream, _, _), (start_us, end_us) in zip(launches, pairs, strict=True):
        if stream == CPU:
            spans.append((CPU, "host", f"wait {name}", start_us, end_us))
            cpu_us = max(cpu_us, start_us, end_us)
            continue
        spans.append((CPU, "launch", f"launch {name}", cpu_us, cpu_us + launch_us))
        cpu_us += launch_us
        kind = "memcpy" if stream == "copy" else "compute"
        spans.append((stream, kind, name, start_us, end_us))
    return forms.said_timeline(spans, unit_ns=1000)


# 0.2: the learner's number draws the net. The step is run again and counted; the
# counterfactual is the same program, resolved with launches that take twice as long.

RETURNED, LAUNCHED, STARTED, FINISHED, SLOWER = LAB.sentences("0.2")


@lru_cache(maxsize=16)
def step_and_slower(number: int) -> tuple[Timeline, Timeline]:
    """The step of a learner's number, and with launches that take twice as long."""
    model, x = given.model_and_batch(number)
    recorded = run(given.train_step, model, x, world_size=1, hardware=GPU)
    assert recorded.program is not None
    slower = replace(GPU, launch_ns=2 * GPU.launch_ns)
    return recorded.timeline, resolve(recorded.program, slower)


@LAB.grader("0.2")
def grade_counts(sheet: Sheet, my_number: int, counts: Mapping[str, Any]) -> None:
    """Each number alone; a wrong one is described by what was counted in its place."""
    forms.need_dict(counts, "counts")
    sheet.ran("your step again, on one GPU, and resolved with slower launches")
    timeline, slower = step_and_slower(int(my_number))
    sheet.show(timeline, title="your step; everything is launched where the grey ends")
    (returned_us, launched, started, finished), twice = count(timeline), count(slower)
    launches = [span.start_ns for span in timeline.spans if given.is_launch(span)]
    slow_ends = [span.end_ns for span in slower.spans if given.is_on_gpu(span)]
    others = {
        "end_us": timeline.end_ns / 1000,
        "last_launch_us": max(launches) / 1000,
        "returned_ns": returned_us * 1000,
        "spans": len(timeline.spans),
        "all_but_one": launched - 1,
        "kernels": len(timeline.spans) - len(launches),
        "started": started,
        "started_and_launched": started + launched,
        "finished": finished,
        "finished_and_launched": finished + launched,
        "twice_finished": 2 * finished,
        "at_old_moment": sum(ns <= 1000 * returned_us for ns in slow_ends),
    }
    right = (returned_us, launched, started, finished, twice.finished)
    tables = LAB.tables("0.2")
    keys = (one["entry"] for one in tables)
    truth = dict(zip(keys, right, strict=True))
    forms.judge_numbers(sheet, tables, counts, truth, others)


# 0.5: the learner's number draws a run of two uneven ranks.

LATE, HELD, LOOKS, DONE = LAB.sentences("0.5")


def read(timeline: Timeline) -> dict[str, Any]:
    """The right answers, from the spans."""
    messages = [s for s in timeline.spans if s.kind == "communication"]
    first, last = sorted(messages, key=lambda s: s.start_ns)
    (wait,) = (s for s in timeline.spans if s.name.startswith("wait"))
    products = [s for s in timeline.spans if (s.kind, s.name) == ("compute", "mm")]
    done = [s for s in products if s.rank == wait.rank and s.end_ns <= wait.end_ns]
    return {
        "late_rank": last.rank,
        "held_us": (last.start_ns - first.start_ns) / 1000,
        "looking_rank": wait.rank,
        "cpu_waits_us": wait.duration_ns / 1000,
        "products": len(done),
    }


@LAB.grader("0.5")
def grade_reading(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Each answer against the spans of the run."""
    forms.need_dict(reading, "reading")
    sheet.ran("the two ranks of your number again")
    timeline = given.two_ranks(int(my_number))
    sheet.show(timeline, title="the two ranks of your number")
    right = read(timeline)
    for one in LAB.tables("0.5"):
        truth = {key: right[key] for key in one["entries"]}
        wrong = [k for k in truth if laws.diagnosis_law(reading, {k: truth[k]})]
        seen = ", ".join(forms.not_filled_in(reading, k) for k in wrong)
        sheet.expect(one["says"], not wrong, seen=seen, expected=one["how"])


# 0.6

USABLE, IS_LAUNCH, IS_GPU, IS_BORDER = LAB.sentences("0.6")
BATCHES: Sequence[int] = turn.knobs["batch"].values
TASKS = forms.KnobTasks(turn, LAB.tables("0.6")[:3])


def saved_at(batch: int) -> float:
    """What shorter launches save on the machine of the third task, in percent."""
    return turn.saved_percent({**BORDER_AT, "batch": batch}, SHORTER)


def border_batch() -> int:
    """The answer to the third task."""
    return min(batch for batch in BATCHES if saved_at(batch) < 10)


@LAB.grader("0.6")
def grade_knobs(sheet: Sheet, found: forms.Settings) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your settings, each resolved again")
    batch = found.get("border") if isinstance(found, Mapping) else None
    if isinstance(batch, Mapping):
        batch = batch.get("batch")
    none = [] if batch in BATCHES else [f"'border' is {batch!r}, not one of {BATCHES}"]
    TASKS.check_usable(sheet, found, more=none)
    sheet.stop_if_wrong()
    TASKS.judge(sheet, found)
    assert isinstance(batch, int)
    seen = f"at batch {batch} they save {saved_at(batch):.1f} %"
    if batch // 2 in BATCHES:
        seen += f", at {batch // 2} {saved_at(batch // 2):.1f} %"
    LAB.expect(sheet, IS_BORDER, batch == border_batch(), seen=seen)
