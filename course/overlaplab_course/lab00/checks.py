"""The graders of lab 00's core: 0.1 to 0.4."""

from __future__ import annotations

import linecache
import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import need_dict
from overlaplab.program import Op, resolve
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.span import Kind
from overlaplab_course.lab00 import checks_extra, reference  # noqa: F401 (0.5, 0.6)
from overlaplab_course.lab00.given import (
    GPU,
    WIDTH,
    Step,
    Train,
    TrainingRun,
    count,
    inputs,
    is_launch,
    is_on_gpu,
    model_and_batch,
    run_step,
    train,
    train_step,
)
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
    "launch": (
        LAUNCH,
        "keep the time of the CPU in a variable: each launch adds its cost",
    ),
    "stream": (STREAM, "keep the end of the last operator of each stream"),
    "wait": (WAIT, "max() of everything that must have ended"),
    "sync": (
        SYNC,
        "the CPU's time becomes the end of what it waits for, if that is later",
    ),
}

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
            sheet.show(said_timeline(launches, launch_us, pairs))
        rows = resolved(launches, launch_us)
        right = [pair == row[:2] for pair, row in zip(pairs, rows, strict=True)]
        wrong = right.index(False) if False in right else len(rows)
        shown |= {row.reason for row in rows[:wrong]}
        left_open |= {row.reason for row in rows[wrong:]}
        if wrong == len(rows):
            continue
        reason = rows[wrong].reason
        if reason == "launch" and any(x.stream == CPU for x in launches[:wrong]):
            reason = "sync"  # its launch came when the CPU was free again
        if reason in faults:
            continue
        (start_us, end_us), row = pairs[wrong], rows[wrong]
        seen = f"line {wrong} ({launches[wrong].name}): {start_us:g} to {end_us:g} us"
        if number:
            seen = (
                f"in another program:\n{launches!r}\na launch costs {launch_us} us\n"
                f"{seen}"
            )
            if not faults:
                drawn = said_timeline(launches, launch_us, pairs)
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


def said_timeline(launches: Sequence[Launch], launch_us: int, pairs: Pairs) -> Timeline:
    """What the learner says, to be drawn; an end before its start becomes a mark.

    An operator that would run beside another of its stream has a lane of its own, so
    that neither hides the other. The launches of the CPU lane are ours: from 0, and on
    from where the learner lets a host sync end.
    """
    spans: list[Span] = []
    cpu_us, lane_end_us = 0.0, dict[str, float]()

    def add(lane: str, kind: Kind, name: str, start_us: float, end_us: float) -> None:
        times_ns = round(1000 * start_us), round(1000 * end_us)
        spans.append(Span(0, lane, kind, name, *times_ns))

    for (name, lane, _, _), (start_us, end_us) in zip(launches, pairs, strict=True):
        end_us = max(start_us, end_us)
        if lane == CPU:
            add(CPU, "host", f"wait {name}", start_us, end_us)
            cpu_us = max(cpu_us, end_us)
            continue
        add(CPU, "launch", f"launch {name}", cpu_us, cpu_us + launch_us)
        cpu_us += launch_us
        kind: Kind = "memcpy" if lane == "copy" else "compute"
        if start_us < lane_end_us.get(lane, start_us):
            lane = f"{lane}, at once"
        lane_end_us[lane] = max(end_us, lane_end_us.get(lane, end_us))
        add(lane, kind, name, start_us, end_us)
    return Timeline.of(spans)


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
    recorded = run(train_step, *model_and_batch(number), world_size=1, hardware=GPU)
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
    on_gpu = sum(is_on_gpu(span) for span in timeline.spans)
    last_begins_us = max(s.start_ns for s in timeline.spans if is_launch(s)) / 1000
    at_old_moment = sum(
        is_on_gpu(span) and span.end_ns <= 1000 * right.returned_us
        for span in slower.spans
    )
    in_the_end = "that many finish in the end; how many by that moment?"
    again = "resolve with slower launches, and count at the new moment: it is later"
    # key, sentence, the right number, how to find it, what other numbers are
    asked: tuple[tuple[str, str, float, str, Mapping[float, str]], ...] = (
        ("returned_us", RETURNED, right.returned_us,
         "the largest .end_ns of a launch span, in us, to within 0.5", {
            timeline.end_ns / 1000: "that is when the GPU has finished; the CPU does "
            "not wait for it",
            last_begins_us: "that is when the last launch begins",
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
        wrong = {n: slip for n, slip in slips.items() if n != number}
        slip = next(
            (f"\n{slip}" for n, slip in wrong.items() if abs(said - n) < 0.5), ""
        )
        sheet.expect(
            sentence,
            bool(abs(said - number) < 0.5),
            seen=f"{key}: {said:g}{slip}",
            expected=how,
        )


# 0.3: the repaired loop must give the same losses and weights, and must win back what
# the waiting cost. How it does so is free: values kept on the GPU and read at the end,
# or a step later, or a few at a time.

LOSSES = "the losses are those of the given loop, as floats"
WORST = "and so is the worst of them"
WEIGHTS = "the model ends with the same weights"
AHEAD = "at least three quarters of what the waiting cost is won back"

# What the lesson shows, and another net with more batches.
SHAPES = ((6, 256, 8, 512), (5, 192, 3, 640))


@lru_cache(maxsize=4)
def ends(shape: tuple[int, ...]) -> tuple[TrainingRun, TrainingRun]:
    """The given loop and the best, on one net."""
    return train(reference.broken_train, *shape), train(reference.good_train, *shape)


@exercise(
    "0.3",
    title="repair: a loop that stops to look",
    solution="train",
    verifies=(LOSSES, WORST, WEIGHTS, AHEAD),
    points=3,
    timeout_s=60.0,
)
def grade_train(sheet: Sheet, train_of_yours: Train) -> None:
    """Values first, then time between the given loop's and the best."""
    sheet.ran("your loop on one GPU: 8 batches of the net above, 3 of another")
    for shape in SHAPES:
        mine = train(train_of_yours, *shape)
        given, best = ends(shape)
        took_ns, given_ns, best_ns = (
            run.timeline.end_ns for run in (mine, given, best)
        )
        if shape == SHAPES[0]:
            title = "your loop, 8 batches"
            sheet.show(mine.timeline, step_ns=took_ns, target_ns=best_ns, title=title)
        _check_training(sheet, mine, given)
        limit_ns = best_ns + (given_ns - best_ns) // 4
        sheet.expect(
            AHEAD,
            took_ns <= limit_ns,
            seen=f"{took_ns / 1e6:.2f} ms; the GPU has nothing to do for "
            f"{mine.idle_ns / 1e6:.2f} ms of it.\n{_describe_waits(mine.waits)}",
            expected=f"at most {limit_ns / 1e6:.2f} ms; the given loop takes "
            f"{given_ns / 1e6:.2f}, one that never waits on the way {best_ns / 1e6:.2f}",
            hint=_waits_hint(len(mine.waits), len(given.losses)),
        )
        sheet.stop_if_wrong()


def _check_training(sheet: Sheet, mine: TrainingRun, given: TrainingRun) -> None:
    losses, worst = mine.losses, mine.worst
    plain = isinstance(losses, Sequence) and all(type(x) is float for x in losses)
    same, seen = False, f"{losses!r:.160}"
    if not plain:
        kinds = (
            {type(x).__name__ for x in losses} if hasattr(losses, "__iter__") else ""
        )
        seen = f"losses is {type(losses).__name__} of {kinds or '?'}: {seen}"
    elif len(losses) != len(given.losses):
        seen = f"{len(losses)} losses: {seen}"
    else:
        pair = torch.tensor(losses), torch.tensor(given.losses)
        same = torch.allclose(*pair, rtol=1e-5)
    sheet.expect(
        LOSSES,
        same,
        seen=seen,
        expected=f"{len(given.losses)} floats: {given.losses!r:.160}",
        hint="a tensor that a later step writes again changes under your hands"
        if plain and len(set(losses)) < len(losses)
        else "",
    )
    sheet.expect(
        WORST,
        type(worst) is float and abs(worst - given.worst) <= 1e-5 * given.worst,
        seen=f"worst is {worst!r}",
        expected=f"{given.worst!r}",
    )
    sheet.verify(WEIGHTS, laws.values_law([mine.weights], given.weights, what="weight"))
    sheet.verify(WEIGHTS, laws.origin_law(mine.program, what="a weight"))


def _describe_waits(waits: Sequence[Op]) -> str:
    if not waits:
        return "The CPU never waits."
    lines = Counter(line_of(op.source) for op in waits if op.source)
    found = [f"  {number} x {line}" for line, number in lines.items()]
    return "\n".join(
        [f"The CPU waits {len(waits)} times{':' if found else '.'}", *found]
    )


def _waits_hint(num_waits: int, num_batches: int) -> str:
    if num_waits >= 2 * num_batches:
        return "two lines of the loop need a number on the CPU before it can go on"
    if num_waits >= num_batches:
        return "one line of the loop still asks the GPU for a number: what about `if`?"
    return "launch every batch first, and look at the numbers after the loop"


# A cell of a notebook is a file with a number for its name; nobody can find that.
_CELL = re.compile(r"(?:\b\d{5,}\.py|<ipython-input-[^>]*>):(\d+)")


def readable(text: str) -> str:
    """Say "your cell, line 8" where `text` names a cell's file and line."""
    return _CELL.sub(r"your cell, line \1", text)


def line_of(source: str) -> str:
    """The line at `source` ("FILE:8 in train"), with its text where it can be found."""
    place, _, function = source.partition(" in ")
    name, _, number = place.rpartition(":")
    paths = [path for path in tuple(linecache.cache) if os.path.basename(path) == name]
    text = linecache.getline(paths[-1], int(number)).strip() if paths else ""
    return f"{readable(place)}" + (f": {text}" if text else f" in {function}")


# 0.4: a message beside a product.

VALUES = "every rank returns a @ a plus the sum of all x"
ONE_SUM = "every rank sends as many bytes as x has"
WAITED = "the message is waited for, before its result is used"
BESIDE = "the message travels beside the product"

# A copy of x, or one launch more, is no fault; running one after the other is.
SLACK = 1.10

_LUCK = re.compile(r" Here it starts ([\d.]+) us later, by luck\.")
_NO_LUCK = (
    r"\n  In this timing the sum is there \1 us before it is used, but nothing makes "
    r"it so.\n  The check hands you the x that is not summed, so that you see it."
)


@exercise(
    "0.4",
    title="two ranks: compute while you send",
    solution="step",
    verifies=(WAITED, VALUES, ONE_SUM, BESIDE),
    points=3,
    timeout_s=60.0,
)
def grade_step(sheet: Sheet, step: Step) -> None:
    """Values on two and three ranks; then what ran beside what."""
    sheet.ran("your step on 2 ranks, then on 3")
    for world_size in (2, 3):
        seen = run_step(step, world_size)
        best_ns = run_step(reference.step, world_size).timeline.end_ns
        took_ns = seen.timeline.end_ns
        if world_size == 2:
            title = "your step on two ranks"
            sheet.show(seen.timeline, step_ns=took_ns, target_ns=best_ns, title=title)
        _check_waited(sheet, seen)
        _check_values(sheet, seen, world_size)
        _check_bytes(sheet, seen)
        sheet.stop_if_wrong()
        report = seen.timeline.report()
        hidden_us, sent_us = report.hidden_ns / 1e3, report.communication_ns / 1e3
        sheet.expect(
            BESIDE,
            took_ns <= SLACK * best_ns,
            seen=f"{hidden_us:.0f} of {sent_us:.0f} us of message have computation "
            f"beside them; the step takes {took_ns / 1e3:.0f} us",
            expected=f"{best_ns / 1e3:.0f} us",
            hint=_order_hint(seen),
        )


def _check_waited(sheet: Sheet, seen: Run) -> None:
    """The first finding; its others say the same of other ranks."""
    found = laws.no_findings_law(seen.warnings, kinds=("unwaited", "hazard"))
    sheet.expect(
        WAITED,
        not found,
        seen=_LUCK.sub(_NO_LUCK, readable(found[0].message)) if found else "",
        expected="wait() stands before the line that uses the sum",
    )


def _check_values(sheet: Sheet, seen: Run, world_size: int) -> None:
    assert seen.program is not None
    given = [inputs(rank) for rank in range(world_size)]
    total = torch.stack([x for x, _ in given]).sum(0)
    wrong = [
        str(rank)
        for rank, (_, a) in enumerate(given)
        if laws.values_law([{"": seen.values[rank]}], {"": a @ a + total}, what="")
    ]
    sheet.expect(
        VALUES,
        not wrong,
        seen=f"on {world_size} ranks: the result is wrong on rank {', '.join(wrong)}",
        expected="a @ a + x, with the sum of all ranks' x for x",
        hint=_values_hint(seen.values[0], *given[0], total, world_size)
        if wrong
        else "",
    )
    sheet.verify(VALUES, laws.origin_law(seen.program))


def _values_hint(
    answer: Tensor, x: Tensor, a: Tensor, total: Tensor, world_size: int
) -> str:
    """What rank 0 added to its product in the place of the sum."""
    if answer.shape != x.shape:
        return f"the shape is {tuple(answer.shape)}, not {tuple(x.shape)}"
    added = answer - a @ a
    for name, other in (("its own x", x), ("the mean", total / world_size)):
        if torch.allclose(added, other.to(added), rtol=1e-4, atol=1e-4):
            return f"rank 0 has {name} in there, not the sum"
    return ""


def _check_bytes(sheet: Sheet, seen: Run) -> None:
    assert seen.program is not None
    wanted = WIDTH * WIDTH * 4
    for rank, ops in enumerate(seen.program.ranks):
        sent = sum(op.collective.bytes for op in ops if op.collective is not None)
        sheet.expect(
            ONE_SUM,
            sent == wanted,
            seen=f"rank {rank} sends {sent} bytes",
            expected=f"{wanted} bytes: x, once",
        )


def _order_hint(seen: Run) -> str:
    """Which order makes the step serial."""
    assert seen.program is not None
    ops = seen.program.ranks[0]
    first = next((op.index for op in ops if op.collective is not None), None)
    product = next((op.index for op in ops if "mm" in op.name), None)
    if first is None or product is None:
        return ""
    if product < first and product in ops[first].after:
        return (
            "a message starts after everything that its stream holds at the launch: "
            "which line should come first?"
        )
    if first in ops[product].after:
        return "what you launch after wait(), or after a blocking call, waits too"
    return ""
