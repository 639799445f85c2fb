"""The graders of 0.3 and 0.4, which run the learner's loop and the learner's step."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from overlaplab.cluster.run import Run
from overlaplab.grading import laws, program_laws
from overlaplab.grading.answered import as_answer, as_number
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.violation import Violation
from overlaplab.grading.wording import readable
from overlaplab.program import Op
from overlaplab_course.lab00 import reference
from overlaplab_course.lab00.given import (
    GPU,
    WIDTH,
    Step,
    Train,
    TrainingRun,
    inputs,
    run_step,
    train,
)

LAB = Declared(__file__)

# 0.3: the repaired loop must give the same losses and weights, and must win back what
# the waiting cost. How it does so is free: values kept on the GPU and read at the end,
# or a step later, or a few at a time.

LOSSES, WORST, WEIGHTS, AHEAD = LAB.sentences("0.3")
# What the lesson shows, and another net with more batches.
SHAPES = ((6, 256, 8, 512), (5, 192, 3, 640))


@lru_cache(maxsize=4)
def given_and_best(shape: tuple[int, ...]) -> tuple[TrainingRun, TrainingRun]:
    """The given loop and the course's, on one net."""
    return train(reference.given_loop, *shape), train(reference.train, *shape)


@LAB.grader("0.3")
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
        size = 4 * len(given.losses)
        sheet.verify(LOSSES, program_laws.read_law(mine.program, size))
        worst, right = mine.worst, given.worst
        number = None if isinstance(worst, torch.Tensor) else as_number(worst)
        near = number is not None and abs(number - right) <= 1e-5 * right
        LAB.expect(sheet, WORST, near, worst=worst, right=right)
        wrong = laws.values_law([mine.weights], given.weights, what="weight")
        # A value that is read at the end, or late, is no fault: time decides.
        program_laws.hold(sheet, mine.run, wrong=wrong, what="a weight", cpu=False)
        limit_ns = best_ns + (given_ns - best_ns) // 4
        names = ("took", "idle", "limit", "given", "best")
        times_ns = (took_ns, mine.idle_ns, limit_ns, given_ns, best_ns)
        hints = LAB.cases("0.3", "waits")[AHEAD]
        LAB.expect(
            sheet,
            AHEAD,
            took_ns <= limit_ns,
            hint=hints[_how_often(mine, len(given.losses))],
            waits=_describe(mine.waits),
            **{name: ns / 1e6 for name, ns in zip(names, times_ns, strict=True)},
        )
        sheet.stop_if_wrong()


def _how_often(mine: TrainingRun, num_batches: int) -> int:
    """Which of the hints: after the loop, one line, two; or the one line is no `if`."""
    ops = mine.program.ranks[0]  # behind the last product the loop has nothing to lose
    end = max((i for i, op in enumerate(ops) if op.name.endswith("mm")), default=0)
    waits = [op for op in ops[:end] if op.kind == "host_wait"]
    often = min(2, round(len(waits) / (num_batches - 1)))
    lines = {line_of(op.source).partition(": ")[2] for op in waits if op.source}
    tests = any(re.search(r"\b(if|while|and|or|not|max|min)\b", line) for line in lines)
    return 3 if often == 1 and lines and not tests else often


def _check_losses(sheet: Sheet, losses: Any, right: Sequence[float]) -> None:
    given, losses = losses, as_answer(losses)
    kinds = {type(x) for x in given} if isinstance(given, list | tuple) else set()
    plain = isinstance(losses, list | tuple) and torch.Tensor not in kinds
    plain = plain and all(as_number(x) is not None for x in losses)
    same, hint, seen = False, "", f"{losses!r:.160}"
    if not plain:
        what = " and ".join(sorted(kind.__name__ for kind in kinds))
        what = f"a list of {what}" if what else f"of type {type(given).__name__}"
        seen = f"losses is {what}, not a list of floats: {given!r:.160}"
    elif len(losses) != len(right):
        seen = f"{len(losses)} losses: {seen}"
    else:
        same = torch.allclose(torch.tensor(losses), torch.tensor(right), rtol=1e-5)
    if plain and len(set(losses)) < len(losses):
        hint = LAB.cases("0.3", "written_again")[LOSSES]
    expected = f"{len(right)} floats: {right!r:.160}"
    sheet.expect(LOSSES, same, seen=seen, expected=expected, hint=hint)


def _describe(waits: Sequence[Op]) -> str:
    if not waits:
        return "The CPU never waits."
    lines = Counter(line_of(op.source) for op in waits if op.source)
    found = [f"  {number} x {line}" for line, number in lines.items()]
    end = ":" if found else "."
    return "\n".join([f"The CPU waits {len(waits)} times{end}", *found])


def line_of(source: str) -> str:
    """The line at `source` ("FILE:8 in train"), with its text where it can be found."""
    place, _, function = source.partition(" in ")
    name, _, number = place.rpartition(":")
    paths = [path for path in tuple(linecache.cache) if os.path.basename(path) == name]
    text = linecache.getline(paths[-1], int(number)).strip() if paths else ""
    return f"{readable(place)}: {text}" if text else f"{readable(place)} in {function}"


# 0.4: a message beside a product

WAITED, VALUES, ONE_SUM, BESIDE = LAB.sentences("0.4")
_TEXTS: Mapping[str, str] = {
    key: text for one in LAB.tables("0.4") for key, text in one.items()
}
# A copy of x, or one launch more, is no fault; running one after the other is.
SLACK = 1.10
_LUCK = re.compile(r" Here it starts ([\d.]+) us later, by luck\.")


# Ranks and the width of x: as in the lesson, and another shape in another world.
STEPS_ON = ((2, WIDTH), (3, 640))
SLOWER = program_laws.slower(GPU, launch_ns=20_000)


@lru_cache(maxsize=4)
def best_step(world_size: int, width: int) -> Run:
    """The course's own."""
    return run_step(reference.step, world_size, width)


@LAB.grader("0.4")
def grade_step(sheet: Sheet, step: Step) -> None:
    """Values and laws on two and three ranks; then what ran beside what."""
    sheet.ran("your step on 2 ranks, then on 3")
    for world_size, width in STEPS_ON:
        seen, best = run_step(step, world_size, width), best_step(world_size, width)
        assert seen.program is not None and best.program is not None
        took_ns, best_ns = seen.timeline.end_ns, best.timeline.end_ns
        if world_size == 2:
            title = "your step on two ranks"
            sheet.show(seen.timeline, step_ns=took_ns, target_ns=best_ns, title=title)
        program_laws.hold(
            sheet,
            seen,
            wrong=_wrong_sums(sheet, seen, world_size, width),
            once=_wrong_bytes(sheet, seen, width),
            cpu=False,  # below, with the time
            told=_without_luck,
        )
        sheet.stop_if_wrong()
        report = seen.timeline.report()
        LAB.expect(
            sheet,
            BESIDE,
            took_ns <= SLACK * best_ns,
            hint=_order_hint(seen),
            hidden=report.hidden_ns / 1e3,
            sent=report.communication_ns / 1e3,
            took=took_ns / 1e3,
            best=best_ns / 1e3,
        )
        sheet.verify(BESIDE, program_laws.cpu_law(seen.program))
        # A message in two halves pays a latency more, three times as dear.
        late = program_laws.slow_law(SLOWER, seen.program, best.program, factor=1.25)
        sheet.verify(BESIDE, late, hint=_order_hint(seen))


def _without_luck(found: list[Violation]) -> list[Violation]:
    """The first finding, in this lab's words; others say the same of other ranks."""

    def said(message: str) -> str:
        return _LUCK.sub(lambda us: _TEXTS["no_luck"].format(us[1]), readable(message))

    expected = _TEXTS["before"]
    return [replace(v, message=said(v.message), expected=expected) for v in found[:1]]


def _wrong_sums(
    sheet: Sheet, seen: Run, world_size: int, width: int
) -> list[Violation]:
    """The result of each rank."""
    pairs = [inputs(rank, width) for rank in range(world_size)]
    total = torch.stack([x for x, _ in pairs]).sum(0)
    products = [a @ a for _, a in pairs]
    wrong = [
        str(rank)
        for rank, product in enumerate(products)
        if laws.values_law([{"": seen.values[rank]}], {"": product + total}, what="")
    ]
    if not wrong:
        return []
    hint, answer, x = "", seen.values[0], pairs[0][0]
    if answer.shape != x.shape:
        hint = _TEXTS["shape"].format(tuple(answer.shape), tuple(x.shape))
    else:  # what rank 0 added to its product in the place of the sum
        added = answer - products[0]
        for name, other in (("the mean", total / world_size), ("its own x", x)):
            if torch.allclose(added, other.to(added), rtol=1e-4, atol=1e-4):
                hint = _TEXTS["instead"].format(name)
    facts: dict[str, Any] = {"world_size": world_size, "ranks": ", ".join(wrong)}
    return [replace(LAB.violation(sheet, VALUES, **facts), hint=hint)]


def _wrong_bytes(sheet: Sheet, seen: Run, width: int) -> list[Violation]:
    """What each rank sends for its result."""
    assert seen.program is not None
    all_x, found = width * width * 4, []
    for rank, ops in enumerate(seen.program.ranks):
        sent = sum(op.collective.bytes for op in ops if op.collective is not None)
        if sent != all_x:
            facts: dict[str, Any] = {"rank": rank, "sent": sent, "all_x": all_x}
            found.append(LAB.violation(sheet, ONE_SUM, **facts))
    return found


def _order_hint(seen: Run) -> str:
    """Which order makes the step serial."""
    assert seen.program is not None
    ops = seen.program.ranks[0]
    first = next((op.index for op in ops if op.collective is not None), None)
    product = next((op.index for op in ops if "mm" in op.name), None)
    hint = ""
    if first is not None and product is not None:
        early, late = sorted((first, product))
        # A blocking message stands in the product's stream.
        same_stream = ops[early].stream == ops[late].stream
        if same_stream or early in ops[late].after:
            hint = "product_first" if early == product else "product_waits"
    return _TEXTS.get(hint, "")
