"""The graders of 0.3 and 0.4, which run the learner's loop and the learner's step."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from overlaplab.cluster.run import Run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.program import Op
from overlaplab_course.lab00 import reference
from overlaplab_course.lab00.given import (
    WIDTH,
    Step,
    Train,
    TrainingRun,
    inputs,
    run_step,
    train,
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
def given_and_best(shape: tuple[int, ...]) -> tuple[TrainingRun, TrainingRun]:
    """The given loop and the course's, on one net."""
    return train(reference.given_loop, *shape), train(reference.train, *shape)


@exercise(
    "0.3",
    title="repair: a loop that stops to look",
    solution="train",
    verifies=(LOSSES, WORST, WEIGHTS, AHEAD),
    points=3,
)
def grade_train(sheet: Sheet, train_of_yours: Train) -> None:
    """Values first, then time between the given loop's and the best."""
    sheet.ran("your loop on one GPU: 8 batches of the net above, 3 of another")
    for shape in SHAPES:
        mine = train(train_of_yours, *shape)
        given, best = given_and_best(shape)
        took_ns, given_ns, best_ns = (r.timeline.end_ns for r in (mine, given, best))
        if shape == SHAPES[0]:
            title = "your loop, 8 batches"
            sheet.show(mine.timeline, step_ns=took_ns, target_ns=best_ns, title=title)
        _check_losses(sheet, mine.losses, given.losses)
        worst, right = mine.worst, given.worst
        near = type(worst) is float and abs(worst - right) <= 1e-5 * right
        sheet.expect(WORST, near, seen=f"worst is {worst!r}", expected=f"{right!r}")
        wrong = laws.values_law([mine.weights], given.weights, what="weight")
        sheet.verify(WEIGHTS, wrong)
        sheet.verify(WEIGHTS, laws.origin_law(mine.program, what="a weight"))
        limit_ns = best_ns + (given_ns - best_ns) // 4
        sheet.expect(
            AHEAD,
            took_ns <= limit_ns,
            seen=f"{took_ns / 1e6:.2f} ms; the GPU has nothing to do for "
            f"{mine.idle_ns / 1e6:.2f} ms of it.\n{_describe(mine.waits)}",
            expected=f"at most {limit_ns / 1e6:.2f} ms; the given loop takes "
            f"{given_ns / 1e6:.2f}, one that never waits on the way "
            f"{best_ns / 1e6:.2f}",
            hint=_waits_hint(len(mine.waits), len(given.losses)),
        )
        sheet.stop_if_wrong()


def _check_losses(sheet: Sheet, losses: Any, right: Sequence[float]) -> None:
    plain = isinstance(losses, Sequence) and all(type(x) is float for x in losses)
    same, hint, seen = False, "", f"{losses!r:.160}"
    if not plain:
        kinds = {type(x).__name__ for x in getattr(losses, "__iter__", tuple)()}
        seen = f"losses is {type(losses).__name__} of {kinds or '?'}: {seen}"
    elif len(losses) != len(right):
        seen = f"{len(losses)} losses: {seen}"
    else:
        same = torch.allclose(torch.tensor(losses), torch.tensor(right), rtol=1e-5)
    if plain and len(set(losses)) < len(losses):
        hint = "a tensor that a later step writes again changes under your hands"
    expected = f"{len(right)} floats: {right!r:.160}"
    sheet.expect(LOSSES, same, seen=seen, expected=expected, hint=hint)


def _describe(waits: Sequence[Op]) -> str:
    if not waits:
        return "The CPU never waits."
    lines = Counter(line_of(op.source) for op in waits if op.source)
    found = [f"  {number} x {line}" for line, number in lines.items()]
    end = ":" if found else "."
    return "\n".join([f"The CPU waits {len(waits)} times{end}", *found])


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
    return f"{readable(place)}: {text}" if text else f"{readable(place)} in {function}"


# 0.4: a message beside a product

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
)
def grade_step(sheet: Sheet, step: Step) -> None:
    """Values on two and three ranks; then what ran beside what."""
    sheet.ran("your step on 2 ranks, then on 3")
    for world_size in (2, 3):
        seen, best = run_step(step, world_size), run_step(reference.step, world_size)
        took_ns, best_ns = seen.timeline.end_ns, best.timeline.end_ns
        if world_size == 2:
            title = "your step on two ranks"
            sheet.show(seen.timeline, step_ns=took_ns, target_ns=best_ns, title=title)
        # The first finding; its others say the same of other ranks.
        found = laws.no_findings_law(seen.warnings, kinds=("unwaited", "hazard"))
        sheet.expect(
            WAITED,
            not found,
            seen=_LUCK.sub(_NO_LUCK, readable(found[0].message)) if found else "",
            expected="wait() stands before the line that uses the sum",
        )
        _check_sums(sheet, seen, world_size)
        sheet.stop_if_wrong()
        report = seen.timeline.report()
        sheet.expect(
            BESIDE,
            took_ns <= SLACK * best_ns,
            seen=f"{report.hidden_ns / 1e3:.0f} of {report.communication_ns / 1e3:.0f} "
            "us of message have computation beside them; the step takes "
            f"{took_ns / 1e3:.0f} us",
            expected=f"{best_ns / 1e3:.0f} us",
            hint=_order_hint(seen),
        )


def _check_sums(sheet: Sheet, seen: Run, world_size: int) -> None:
    """The result of each rank, and what each sends for it."""
    assert seen.program is not None
    pairs = [inputs(rank) for rank in range(world_size)]
    total = torch.stack([x for x, _ in pairs]).sum(0)
    products = [a @ a for _, a in pairs]
    wrong = [
        str(rank)
        for rank, product in enumerate(products)
        if laws.values_law([{"": seen.values[rank]}], {"": product + total}, what="")
    ]
    hint, (answer, x) = "", (seen.values[0], pairs[0][0])
    if wrong and answer.shape != x.shape:
        hint = f"the shape is {tuple(answer.shape)}, not {tuple(x.shape)}"
    elif wrong:  # what rank 0 added to its product in the place of the sum
        added = answer - products[0]
        for name, other in (("the mean", total / world_size), ("its own x", x)):
            if torch.allclose(added, other.to(added), rtol=1e-4, atol=1e-4):
                hint = f"rank 0 has {name} in there, not the sum"
    sheet.expect(
        VALUES,
        not wrong,
        seen=f"on {world_size} ranks: the result is wrong on rank {', '.join(wrong)}",
        expected="a @ a + x, with the sum of all ranks' x for x",
        hint=hint,
    )
    sheet.verify(VALUES, laws.origin_law(seen.program))
    for rank, ops in enumerate(seen.program.ranks):
        sent, all_x = (
            sum(op.collective.bytes for op in ops if op.collective),
            WIDTH**2 * 4,
        )
        sheet.expect(
            ONE_SUM,
            sent == all_x,
            seen=f"rank {rank} sends {sent} bytes",
            expected=f"{all_x} bytes: x, once",
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
