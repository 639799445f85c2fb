"""Graders of the chains of lab 16: 16.1 and 16.3. Answers are walked, not compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

from overlaplab.grading import Sheet
from overlaplab.grading.answered import as_answer, as_number
from overlaplab.grading.declared import Declared
from overlaplab.grading.laws import regret
from overlaplab_course.lab16 import chains, reference
from overlaplab_course.lab16.chains import UNEVEN, Block

LAB = Declared(__file__)
INPUTS, AT_WORK, KEPT, LARGEST = LAB.sentences("16.1")
USABLE, FITS, NONE, LITTLE, MONOTONIC = LAB.sentences("16.3")
AT_MOST = 0.05
Peak = Callable[[Sequence[Block], Collection[int]], Any]
Fastest = Callable[[Sequence[Block], int], Any]

# In the chains of a sentence only what it speaks of is large or there at all.
_INPUTS = tuple(Block(size, 0, 0, 1) for size in (3, 5, 7, 11))
_ALONE = (Block(0, 40, 9, 2),)
_INSIDES = tuple(Block(0, size, 0, 1) for size in (13, 17, 4, 60))
_MIDDLE = (Block(0, 2, 1, 1), Block(0, 3, 90, 1), Block(0, 2, 1, 1), Block(0, 4, 1, 1))
_EARLY = (Block(0, 80, 50, 1), Block(0, 3, 1, 1), Block(0, 2, 1, 1))
CASES: dict[str, Sequence[tuple[str, Sequence[Block], set[int]]]] = {
    INPUTS: (
        ("4 blocks of inputs alone", _INPUTS, set()),
        ("4 blocks of inputs alone", _INPUTS, {0, 1, 2, 3}),
    ),
    AT_WORK: (
        ("1 block without input", _ALONE, set()),
        ("1 block without input", _ALONE, {0}),
    ),
    KEPT: (
        ("4 blocks of insides alone", _INSIDES, set()),
        ("4 blocks of insides alone", _INSIDES, {0}),
        ("4 blocks of insides alone", _INSIDES, {0, 2}),
    ),
    LARGEST: (
        ("4 blocks, one that works hard", _MIDDLE, {0}),
        ("3 blocks, the first the largest", _EARLY, {0, 1}),
        *(
            (f"{n} blocks", chains.random_chain(n, seed), {*range(seed % 3, n, 2)})
            for n, seed in ((2, 1), (5, 2), (9, 3), (24, 4), (24, 5))
        ),
    ),
}


@LAB.grader("16.1")
def grade_peak(sheet: Sheet, peak: Peak) -> None:
    """Each chain is walked through a step; what lives then is the right answer."""
    for sentence, cases in CASES.items():
        for case, blocks, again in cases:
            sheet.ran(f"peak() of {case}, and a step of it")
            said = peak(list(blocks), set(again))
            right = chains.peak_of(blocks, again)
            told: dict[str, Any] = {"case": case, "said": f"{said!r:.60}"}
            told |= {"again": sorted(again)}
            wrong = as_number(said) != right
            LAB.refuse(sheet, sentence, wrong, right=right, **told)
            if sentence == LARGEST or wrong:
                _draw(sheet, blocks, again, f"the step: {case}, again {sorted(again)}")
            if wrong:
                break
        sheet.stop_if_wrong()


def _draw(
    sheet: Sheet, blocks: Sequence[Block], again: Collection[int], title: str
) -> None:
    sheet.show(chains.walk(blocks, again), title=title)


# -- 16.3


@lru_cache(maxsize=1)
def every_chain() -> dict[str, tuple[Block, ...]]:
    """Chains that the lesson does not show, but for the first."""
    found: dict[str, tuple[Block, ...]] = {"the lesson's eight blocks": UNEVEN}
    for count, seed in ((1, 3), (6, 11), (8, 12), (16, 13), (24, 14), (36, 15)):
        found[f"{count} blocks, no. {seed}"] = chains.random_chain(count, seed)
    # Two cheap blocks do what one dear one does; the dearest per MiB is the right one.
    found["3 blocks, one too large"] = (
        Block(1, 60, 0, 10),
        Block(1, 35, 0, 6),
        Block(1, 30, 0, 5),
        Block(1, 40, 10, 1),
    )
    return found


@lru_cache(maxsize=16)
def budgets(blocks: tuple[Block, ...]) -> tuple[int, ...]:
    """From too little to more than enough, rising."""
    numbers = range(len(blocks))
    least, most = (chains.peak_of(blocks, again) for again in (numbers, ()))
    parts = [least + (most - least) * part // 10 for part in range(11)]
    near = [budget + max(1, (most - least) // 60) for budget in parts]
    return tuple(sorted({least - 1, *parts, *near, most + 50}))


@lru_cache(maxsize=256)
def best(blocks: tuple[Block, ...], budget: int) -> frozenset[int] | None:
    """The course's own; tests hold it to brute force."""
    found = reference.fastest(blocks, budget)
    return None if found is None else frozenset(found)


@LAB.grader("16.3")
def grade_fastest(sheet: Sheet, fastest: Fastest) -> None:
    """Every answer is walked through a step: bytes and time are what that shows."""
    for case, blocks in every_chain().items():
        what = f"fastest() of {case} under {len(budgets(blocks))} budgets"
        # The lesson's eight blocks come first: whoever ends there has no endless loop.
        late = "" if blocks == UNEVEN else LAB.hint(LITTLE, "late").format(len(blocks))
        sheet.ran(what, if_late=late)
        answers = [fastest(list(blocks), budget) for budget in budgets(blocks)]
        judged = [
            _judge(sheet, case, blocks, budget, answer)
            for budget, answer in zip(budgets(blocks), answers, strict=True)
        ]
        fitting = [one for one in judged if one is not None]
        _judge_time(sheet, case, blocks, fitting)
        sheet.stop_if_wrong()


@dataclass(frozen=True)
class _Choice:
    """An answer that fits its budget."""

    budget: int
    again: frozenset[int]
    extra: int  # ms
    best: int  # ms


def _judge(
    sheet: Sheet, case: str, blocks: tuple[Block, ...], budget: int, answer: object
) -> _Choice | None:
    """Whether the answer is one, and fits; None if it does not, or nothing does."""
    facts: dict[str, Any] = {"case": case, "budget": budget, "count": len(blocks)}
    facts["answer"] = f"{answer!r:.120}"
    again, right = read_choice(answer, len(blocks)), best(blocks, budget)
    usable = again is not None or answer is None
    LAB.refuse(sheet, USABLE, not usable, **facts)
    shown = "None" if right is None else f"for example {sorted(right)}"
    gave_up = usable and (again is None) != (right is None)
    LAB.refuse(sheet, NONE, gave_up, right=shown, **facts)
    if again is None or right is None:
        return None
    peak = chains.peak_of(blocks, again)
    LAB.refuse(sheet, FITS, peak > budget, peak=peak, **facts)
    if peak > budget or case.startswith("the lesson's"):
        _draw(sheet, blocks, again, f"your choice: {case}, budget {budget} MiB")
    if peak > budget:
        return None
    extra, least = (chains.extra_ms(blocks, choice) for choice in (again, right))
    return _Choice(budget, frozenset(again), extra, least)


def _judge_time(
    sheet: Sheet, case: str, blocks: tuple[Block, ...], found: Sequence[_Choice]
) -> None:
    most = chains.extra_ms(blocks, range(len(blocks)))
    lost = {one: regret(one.extra, one.best, most) for one in found}
    mean = sum(lost.values()) / max(len(lost), 1)
    wasteful = mean > AT_MOST
    if wasteful:
        one = max(found, key=lambda choice: lost[choice])
        told: dict[str, Any] = {"lost": mean, "budget": one.budget, "best": one.best}
        told |= {"extra": one.extra, "answer": sorted(one.again)}
        right = sorted(best(blocks, one.budget) or ())
        LAB.refuse(sheet, LITTLE, True, case=case, right=right, **told)
        _draw(sheet, blocks, one.again, f"your choice: {case}, {one.budget} MiB")
    else:
        LAB.refuse(sheet, LITTLE, False)
    for less, more in pairwise(found):
        slower = more.extra > less.extra
        told = {"extra": more.extra, "before": less.extra, "budget": more.budget}
        LAB.refuse(sheet, MONOTONIC, slower, case=case, less=less.budget, **told)


def read_choice(answer: object, count: int) -> set[int] | None:
    """Block numbers, in whatever holds them; None for anything else."""
    answer = as_answer(answer)
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping):
        return None
    numbers = [as_number(number) for number in islice(answer, count + 1)]
    if any(n is None or n != int(n) or not 0 <= n < count for n in numbers):
        return None
    return {int(n) for n in numbers if n is not None}
