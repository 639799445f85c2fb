"""The grader of lab 08's late gradients, 8.3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from overlaplab.errors import DeadlockError, MismatchError
from overlaplab.grading import Sheet, Violation, laws
from overlaplab.view import format_bytes
from overlaplab_course.lab08 import late, reference
from overlaplab_course.lab08.feed_checks import LAB
from overlaplab_course.lab08.late import BOARD, SLOW_LINK, Case, MakeReducer, Trained
from overlaplab_course.peaks import most_bytes

LATE, FLUSH, ONCE, SAFE, TWO_SETS, CPU, BESIDE = LAB.sentences("8.3")
CLOCKS = {"the fast link": BOARD, "the slow link": SLOW_LINK}


@lru_cache(maxsize=8)
def best(case: Case) -> Trained:
    """The course's own."""
    return late.train(reference.LateReducer, case)


@LAB.grader("8.3")
def grade_late(sheet: Sheet, make_reducer: MakeReducer) -> None:
    """Three models on 2, 3 and 4 ranks, flushed at the end and in between."""
    played = []
    for case in late.CASES:
        sheet.ran(f"{case.name}, {case.num_ranks} ranks, {_steps_text(case)}")
        try:
            seen = late.train(make_reducer, case)
        except (DeadlockError, MismatchError) as error:
            sheet.show(None)
            hint = "every rank launches the same messages in the same order"
            sheet.verify(ONCE, [Violation("order", str(error), hint=hint)])
            return
        _draw(sheet, seen, best(case))
        sheet.verify(SAFE, laws.no_findings_law(seen.findings))
        wrong = _wrong_weights(seen)
        sheet.verify(LATE, wrong, hint=_like(seen) if wrong else "")
        sheet.verify(LATE, laws.origin_law(seen.program, what="a weight"))
        _judge_flush(sheet, seen)
        once = [*laws.once_law(seen.evidence), *laws.bytes_law(seen.evidence)]
        sheet.verify(ONCE, [*once, *laws.same_order_law(seen.evidence)])
        _judge_memory(sheet, seen)
        _judge_cpu(sheet, seen)
        sheet.stop_if_wrong()
        played.append(seen)
    for clock, hardware in reversed(CLOCKS.items()):
        for seen in reversed(played):
            case, timed = seen.case, seen.on(hardware)
            right = best(case).on(hardware)
            sheet.ran(f"{case.name}, {case.num_ranks} ranks, {clock}")
            _draw(sheet, timed, right)
            slow = laws.step_law(timed.step_ns, right.step_ns, factor=1.05)
            sheet.verify(BESIDE, slow)
            sheet.stop_if_wrong()


def _steps_text(case: Case) -> str:
    return " and ".join(f"{n} steps, then a flush" for n in case.segments)


def _draw(sheet: Sheet, seen: Trained, right: Trained) -> None:
    steps = {"step_ns": seen.step_ns, "target_ns": right.step_ns}
    sheet.show(seen.timeline, title=f"your run: {seen.case.name}", **steps)


def _wrong_weights(seen: Trained) -> list[Violation]:
    """After each step; what a flush gives is another sentence's."""
    want, found = late.right(seen.case), []
    for place, step in _places(seen.case):
        mine = [weights[place] for weights, _ in seen.values]
        found += laws.values_law(mine, want[place], what="the value", step=step)
    return found


def _places(case: Case) -> list[tuple[int, int]]:
    """(place among the updates, step) of the steps that are no flush."""
    found, place = [], 0
    for steps in late.numbered(case.segments):
        for step in steps:
            found.append((place, step))
            place += 1
        place += 2
    return found


def _like(seen: Trained) -> str:
    """Which known slip gives the weights of rank 0, as a hint; "" for none."""
    steps = [place for place, _ in _places(seen.case)][: seen.case.segments[0]]
    mine = [seen.values[0][0][place] for place in steps]
    for why, slip in late.SLIPS.items():
        wrong = late.right(seen.case, slip=slip)
        if all(_same(a, wrong[p]) for a, p in zip(mine, steps, strict=True)):
            return LAB.hint(LATE, why)
    return ""


def _same(a: late.Weights, b: late.Weights) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in b)


def _judge_flush(sheet: Sheet, seen: Trained) -> None:
    want = late.right(seen.case)
    ends: Sequence[int] = [
        sum(seen.case.segments[: i + 1]) for i in range(len(seen.case.segments))
    ]
    for rank, (weights, said) in enumerate(seen.values):
        for i, steps in enumerate(ends):
            first, second = said[2 * i : 2 * i + 2]
            at = steps + 2 * i  # wrong weights before it are another sentence's
            what = expected = ""
            if first is not True or second is not False:
                what = f"flush() returned {first!r}, and {second!r} when called again"
                expected = "True, then False"
            elif _same(weights[at - 1], want[at - 1]) and not _same(
                weights[at], want[at]
            ):
                what = "the update with what flush() gave is wrong"
                expected = "the average of the last step in every .grad"
            if what:
                facts: dict[str, Any] = {"rank": rank, "steps": steps, "what": what}
                LAB.refuse(sheet, FLUSH, True, expected=expected, **facts)
                return
    sheet.expect(FLUSH, True)


def _judge_memory(sheet: Sheet, seen: Trained) -> None:
    held, least = most_bytes(seen.program), most_bytes(best(seen.case).program)
    more = (held - least) / seen.gradient_bytes
    facts: dict[str, Any] = {"held": format_bytes(held), "more": more}
    facts["least"] = format_bytes(least)
    LAB.refuse(sheet, TWO_SETS, more > 0.5, **facts)


def _judge_cpu(sheet: Sheet, seen: Trained) -> None:
    for rank, ops in enumerate(seen.program.ranks):
        for op in ops:
            if op.kind == "host_wait":
                source = f" [{op.source}]" if op.source else ""
                facts: dict[str, Any] = {"rank": rank, "name": op.name}
                facts["source"] = source
                LAB.refuse(sheet, CPU, True, **facts)
                return
    sheet.expect(CPU, True)
