"""The grader of lab 08's late gradients, 8.3."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from overlaplab.grading import Sheet, Violation, fixtures, laws, program_laws
from overlaplab.grading.fixtures import Gradients
from overlaplab.view import format_bytes
from overlaplab_course.lab08 import late, reference
from overlaplab_course.lab08.feed_checks import LAB
from overlaplab_course.lab08.late import BOARD, SLOW_LINK, Case, MakeReducer, Trained
from overlaplab_course.peaks import most_bytes

LATE, FLUSH, ONCE, SAFE, TWO_SETS, CPU, BESIDE = LAB.sentences("8.3")
CLOCKS = {
    "the fast link": BOARD,
    "the slow link": program_laws.slower(SLOW_LINK, launch_ns=5_000, wire=1),
}
# A set has another order on one of its ranks.
APART = replace(late.EQUAL, segments=(2,))


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
        hint = "every rank launches the same messages in the same order"
        with sheet.meeting(ONCE, hint=hint):
            seen = late.train(make_reducer, case)
        _draw(sheet, seen, best(case))
        wrong, flushed = _wrong_gradients(seen)
        once = [*laws.once_law(seen.evidence), *laws.bytes_law(seen.evidence)]
        program_laws.hold(
            sheet,
            seen.run,
            wrong=wrong,
            once=[*once, *laws.same_order_law(seen.evidence)],
            what="a gradient",
            hints={"recorded": LAB.hint(LATE, _slip(seen))},
        )
        if not wrong:  # else no flush was looked at
            sheet.verify(FLUSH, flushed)
        _judge_memory(sheet, seen)
        sheet.stop_if_wrong()
        played.append(seen)
    _judge_empty_flush(sheet, make_reducer)
    apart = program_laws.order_law(
        "your reducer",
        lambda: late.train(make_reducer, APART, apart=True),
        lambda seen: _wrong_gradients(seen)[0],
    )
    sheet.verify(ONCE, apart)
    sheet.stop_if_wrong()
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


def _wrong_gradients(seen: Trained) -> tuple[list[Violation], list[Violation]]:
    """What each update found; and what a flush, and the next one, did."""
    want, parameters = late.right(seen.case)
    found: dict[str, list[Violation]] = {LATE: [], FLUSH: []}
    rows = zip(seen.case.updates, seen.gradients, want, strict=True)
    after_flush = False
    for (step, flushed), mine, ours in rows:
        what = "what flush() left in .grad" if flushed else ".grad"
        wrong = laws.values_law(mine, ours, what=what, step=step)
        found[FLUSH if flushed or after_flush else LATE] += wrong
        after_flush = flushed
        if wrong:  # the weights go other ways from here on
            break
    else:
        ends = laws.values_law(seen.parameters, parameters, what="the value")
        hint = LAB.hint(FLUSH, "said")
        found[FLUSH] += [replace(v, hint=hint) for v in ends]
    return found[LATE], found[FLUSH]


def _slip(seen: Trained) -> str:
    """Which known slip the first gradients of rank 0 show; "" for none."""
    case, first = seen.case, seen.gradients[0][0]
    given = [grad for grad in first.values() if grad is not None]
    if given and all(not bool(grad.any()) for grad in given):
        return "zero"
    if given:
        size = case.num_ranks
        at_once, _ = fixtures.oracle(case.fixture, steps=1, world_size=size)
        return "undelayed" if _are(first, at_once[0]) else "own"
    if case.segments[0] < 2:
        return ""
    second, right = seen.gradients[1][0], late.right(case)[0][1]
    if all(grad is None for grad in second.values()):
        return "two"
    return "sum" if _are(second, right, case.num_ranks) else ""


def _are(seen: Gradients, right: Gradients, factor: int = 1) -> bool:
    return all(
        mine is not None
        and ours is not None
        and torch.allclose(mine, factor * ours, rtol=1e-3, atol=1e-6)
        for mine, ours in ((seen[name], right[name]) for name in right)
    )


def _judge_empty_flush(sheet: Sheet, make_reducer: MakeReducer) -> None:
    said = late.flush_of_nothing(make_reducer)
    wrong = [rank for rank, value in enumerate(said) if value is not False]
    rank = wrong[0] if wrong else 0
    LAB.refuse(sheet, FLUSH, bool(wrong), why="said", rank=rank, said=repr(said[rank]))


def _judge_memory(sheet: Sheet, seen: Trained) -> None:
    held, least = most_bytes(seen.program), most_bytes(best(seen.case).program)
    more = (held - least) / seen.gradient_bytes
    facts: dict[str, Any] = {"held": format_bytes(held), "more": more}
    facts["least"] = format_bytes(least)
    LAB.refuse(sheet, TWO_SETS, more > 0.5, **facts)
