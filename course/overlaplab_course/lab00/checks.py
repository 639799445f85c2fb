"""The graders of lab 00: here of 0.1, 0.2, 0.5 and 0.6, what is said of programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from overlaplab.cluster.run import run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import (
    KnobTask,
    KnobTasks,
    Settings,
    need_dict,
    read_pairs,
    said_timeline,
)
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab00 import checks_runs, given  # noqa: F401 (0.3 and 0.4)
from overlaplab_course.lab00.given import BORDER_AT, FASTER, GPU, SHORTER, count, turn
from overlaplab_course.lab00.launches import (
    CPU,
    LAUNCH_US,
    Launch,
    Launches,
    Reason,
    Row,
    draw,
    resolved,
    six_launches,
)

# 0.1: a function, or the table of the own six launches. A wrong row is charged to what
# holds it in truth, so that a forgotten rule is refused by its own sentence. What comes
# after the first wrong row follows from it: a rule is called right only where rows
# before it show so.

LAUNCH = "with its stream free, an operator starts when its launch has ended"
STREAM = "behind another in its stream, it starts when that one has ended"
WAIT = "an operator that waits starts when what it waits for has ended"
SYNC = "a host sync holds the CPU until then, and costs no launch"
_RULES: Mapping[Reason, tuple[str, str]] = {  # sentence and hint
    "launch": (LAUNCH, "keep the time of the CPU in a variable: each launch adds its "
               "cost"),
    "stream": (STREAM, "keep the end of the last operator of each stream"),
    "wait": (WAIT, "max() of everything that must have ended"),
    "sync": (SYNC, "the CPU's time becomes the end of what it waits for, if that is "
             "later"),
}  # fmt: skip

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
    faults: dict[Reason, tuple[str, str]] = {}  # seen and expected
    shown: set[Reason] = set()  # rules of right rows, before the first wrong one
    left_open: set[Reason] = set()  # rules of the rows from there on
    for number, (launches, launch_us) in enumerate(programs):
        pairs = _pairs(schedule, launches, launch_us)
        if number == 0:
            sheet.show(draw_pairs(launches, launch_us, pairs))
        rows = resolved(launches, launch_us)
        right = [pair == row[:2] for pair, row in zip(pairs, rows, strict=True)]
        wrong = right.index(False) if False in right else len(rows)
        shown |= {row.reason for row in rows[:wrong]}
        left_open |= {row.reason for row in rows[wrong:]}
        if wrong == len(rows):
            continue
        line, row, (start_us, end_us) = launches[wrong], rows[wrong], pairs[wrong]
        reason = row.reason
        if reason == "launch" and any(x.stream == CPU for x in launches[:wrong]):
            reason = "sync"  # its launch came when the CPU was free again
        if reason in faults:
            continue
        seen = f"line {wrong} ({line.name}): {start_us:g} to {end_us:g} us"
        if number:
            table = f"{launches!r}\na launch costs {launch_us} us"
            seen = f"in another program:\n{table}\n{seen}"
            if not faults:
                drawn = draw_pairs(launches, launch_us, pairs)
                sheet.show(drawn, title="that program, by you")
        why = _why(launches, rows, wrong)
        faults[reason] = seen, f"{row.start_us} to {row.end_us} us: {why}"
    # Six rows show little: of a table, a rule holds if none of its rows is left open.
    held = shown if callable(schedule) else shown - left_open
    for reason, (sentence, hint) in _RULES.items():
        if reason in faults:
            seen, expected = faults[reason]
            sheet.expect(sentence, False, seen=seen, expected=expected, hint=hint)
        elif not faults or reason in held:
            sheet.expect(sentence, True)


def _pairs(
    schedule: Schedule | Sequence[Any], launches: Launches, launch_us: int
) -> Pairs:
    """What the learner says; one pair for each line, or a ValueError."""
    said = schedule(Launches(launches), launch_us) if callable(schedule) else schedule
    wanted = f"{len(launches)} pairs (start, end) in us"
    pairs = read_pairs(said, "the schedule is", wanted)
    if len(pairs) != len(launches):
        raise ValueError(
            f"the schedule has {len(pairs)} pairs; expected {len(launches)}, one for "
            "each line (the host sync too)"
        )
    return pairs


def _why(launches: Launches, rows: Sequence[Row], position: int) -> str:
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
    return said_timeline(spans, unit_ns=1000)


# 0.2: the learner's number draws the net. The step is run again and counted; the
# counterfactual is the same program, resolved with launches that take twice as long.

RETURNED = "when backward() returned: the end of the last launch"
LAUNCHED = "how many operators had been launched"
STARTED = "how many had started on the GPU"
FINISHED = "how many had finished"
SLOWER = "how many had finished with launches that take twice as long"


@lru_cache(maxsize=16)
def step_and_slower(number: int) -> tuple[Timeline, Timeline]:
    """The step of a learner's number, and with launches that take twice as long."""
    model, x = given.model_and_batch(number)
    recorded = run(given.train_step, model, x, world_size=1, hardware=GPU)
    assert recorded.program is not None
    slower = replace(GPU, launch_ns=2 * GPU.launch_ns)
    return recorded.timeline, resolve(recorded.program, slower)


@exercise(
    "0.2",
    title="what has happened when backward() returns?",
    solution=("my_number", "counts"),
    verifies=(RETURNED, LAUNCHED, STARTED, FINISHED, SLOWER),
    points=2,
    timeout_s=30.0,
)
def grade_counts(sheet: Sheet, my_number: int, counts: Mapping[str, Any]) -> None:
    """Each number alone; a wrong one is described by what was counted in its place."""
    need_dict(counts, "counts")
    sheet.ran("your step again, on one GPU, and resolved with slower launches")
    timeline, slower = step_and_slower(int(my_number))
    sheet.show(timeline, title="your step; everything is launched where the grey ends")
    right, twice = count(timeline), count(slower)
    starts = [span.start_ns for span in timeline.spans if span.kind == "launch"]
    on_gpu = len(timeline.spans) - len(starts)
    ends = [span.end_ns for span in slower.spans if given.is_on_gpu(span)]
    at_old_moment = sum(end_ns <= 1000 * right.returned_us for end_ns in ends)
    in_the_end = "that many finish in the end; how many by that moment?"
    again = "resolve with slower launches, and count at the new moment: it is later"
    # Key, sentence, the right number, how to find it, what other numbers are.
    asked: tuple[tuple[str, str, float, str, Mapping[float, str]], ...] = (
        ("returned_us", RETURNED, right.returned_us,
         "the largest .end_ns of a launch span, in us, to within 0.5", {
            timeline.end_ns / 1000: "that is when the GPU has finished; the CPU does "
            "not wait for it",
            max(starts) / 1000: "that is when the last launch begins",
            right.returned_us * 1000: "that is in ns"}),
        ("launched", LAUNCHED, right.launched, "the number of launch spans", {
            len(timeline.spans): "that counts launches and kernels together",
            right.launched - 1: "the one that ends at that moment counts too"}),
        ("started", STARTED, right.started,
         "compute spans whose .start_ns is not after that moment", {
            on_gpu: "a launch is not a start: when does its kernel begin?",
            right.finished: "one is running at that moment: it has started",
            right.started + right.launched: "launch spans are the CPU's, no starts"}),
        ("finished", FINISHED, right.finished,
         "compute spans whose .end_ns is not after that moment", {
            on_gpu: in_the_end,
            right.started: "one of them is still running",
            right.finished + right.launched: "launch spans are the CPU's, no kernels"}),
        ("finished_if_slower", SLOWER, twice.finished,
         "the same, in the timeline resolved again, at its own later moment", {
            at_old_moment: again,
            right.finished: again,
            2 * right.finished: "twice the launches' cost is not twice the number",
            on_gpu: in_the_end}),
    )  # fmt: skip
    for key, sentence, number, how, slips in asked:
        said = counts.get(key)
        if isinstance(said, bool) or not isinstance(said, int | float):
            seen = f"{key!r} is {said!r}" if key in counts else f"there is no {key!r}"
            sheet.expect(sentence, False, seen=seen, expected=f"a number: {how}")
            continue
        others = {n: slip for n, slip in slips.items() if n != number}
        found = [f"\n{slip}" for n, slip in others.items() if abs(said - n) < 0.5]
        seen = f"{key}: {said:g}{''.join(found[:1])}"
        right_one = bool(abs(said - number) < 0.5)
        sheet.expect(sentence, right_one, seen=seen, expected=how)


# 0.5: the learner's number draws a run of two uneven ranks.

LATE = "which rank the message waits for"
HELD = "how long the other rank's message waits for it"
LOOKS = "which rank's CPU waits for its GPU, and how long"
DONE = "how many products that rank's GPU has finished when its CPU goes on"


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


@exercise(
    "0.5",
    title="read a timeline",
    solution=("my_number", "reading"),
    verifies=(LATE, HELD, LOOKS, DONE),
    optional=True,
    timeout_s=30.0,
)
def grade_reading(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Each answer against the spans of the run."""
    need_dict(reading, "reading")
    sheet.ran("the two ranks of your number again")
    timeline = given.two_ranks(int(my_number))
    sheet.show(timeline, title="the two ranks of your number")
    right = read(timeline)
    for sentence, keys, how in (
        (LATE, ("late_rank",), "the rank whose span on `comm` starts later"),
        (HELD, ("held_us",), "from the start of the earlier rank's span on `comm` to "
         "the start of the later's, in us, to within 3 %"),
        (LOOKS, ("looking_rank", "cpu_waits_us"), "the rank with a span on `cpu` whose "
         "name begins with `wait`, and that span's length in us, to within 3 %"),
        (DONE, ("products",), "compute spans named `mm` of that rank that end no later "
         "than the wait"),
    ):  # fmt: skip
        wrong = [k for k in keys if laws.diagnosis_law(reading, {k: right[k]})]
        seen = [
            f"{k} is {reading[k]!r}" if k in reading else f"there is no {k!r}"
            for k in wrong
        ]
        sheet.expect(sentence, not wrong, seen=", ".join(seen), expected=how)


# 0.6

IS_LAUNCH = f"launch-bound: {SHORTER} save 40 %, {FASTER} under 2 %"
IS_GPU = f"GPU-bound: {FASTER} saves 40 %, {SHORTER} under 2 %"
IS_BORDER = f"border: the smallest batch at which {SHORTER} save under 10 %"
BATCHES: Sequence[int] = turn.knobs["batch"].values
TASKS = KnobTasks(
    turn,
    usable="each entry has values that the sliders have",
    measure=lambda s: {
        "shorter": turn.saved_percent(s, SHORTER),
        "faster": turn.saved_percent(s, FASTER),
    },
    hint="the batch makes kernels long; it makes no more of them",
    expected=f"some of {list(turn.knobs)}; for 'border' a batch",
    tasks=(
        KnobTask(
            "launch-bound",
            IS_LAUNCH,
            lambda n: n["shorter"] >= 40 and n["faster"] < 2,
            seen=f"{SHORTER}: {{shorter:.1f}} %; {FASTER}: {{faster:.1f}} %",
            expected="40 % or more, and under 2 %",
        ),
        KnobTask(
            "GPU-bound",
            IS_GPU,
            lambda n: n["faster"] >= 40 and n["shorter"] < 2,
            seen=f"{FASTER}: {{faster:.1f}} %; {SHORTER}: {{shorter:.1f}} %",
            expected="40 % or more, and under 2 %",
        ),
    ),
)


def saved_at(batch: int) -> float:
    """What shorter launches save on the machine of the third task, in percent."""
    return turn.saved_percent({**BORDER_AT, "batch": batch}, SHORTER)


def border_batch() -> int:
    """The answer to the third task."""
    return min(batch for batch in BATCHES if saved_at(batch) < 10)


@exercise(
    "0.6",
    title="launch-bound or GPU-bound?",
    solution="found",
    verifies=(*TASKS.sentences, IS_BORDER),
    optional=True,
    timeout_s=20.0,
)
def grade_knobs(sheet: Sheet, found: Settings) -> None:
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
    sheet.expect(
        IS_BORDER,
        batch == border_batch(),
        seen=seen,
        expected="under 10 % at your batch, and 10 % or more at half of it",
        hint=", ".join(f"{k}={v}" for k, v in BORDER_AT.items()),
    )
