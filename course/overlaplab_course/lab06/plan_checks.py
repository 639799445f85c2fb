"""The grader of 6.1: laws of a plan, held to it on random models."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.laws import Violation

LAB = Declared(__file__)
ONCE, FULL, DTYPE, ARRIVAL, RUN, CAP, MAXIMAL, LAUNCH, REFUSED = LAB.sentences("6.1")
NUM_MODELS = 200
KIB = 1024
DTYPES = (torch.float32, torch.bfloat16)

Plan = list[list[int]]


@LAB.grader("6.1")
def grade_plan(sheet: Sheet, plan_buckets: Callable[..., Any]) -> None:
    """Hold the plan to its laws on `NUM_MODELS` models, small ones first."""
    sheet.ran(f"plan_buckets on {NUM_MODELS} random models and caps")
    broken: dict[str, list[Violation]] = {}
    right = LAB.cases("6.1", "expected")
    for params, cap_bytes in random_models():
        plan = _planned(plan_buckets, params, cap_bytes)
        for law, message, *backward in broken_laws(plan, params, cap_bytes):
            seen = f"{_described(params, cap_bytes)}\nyour plan: {plan}\n{message}"
            expected = right[law].format(cap=cap_bytes, backward=backward)
            lost = law == ONCE and "in no bucket" in message
            hint = "what happens to the bucket that is still open after the last one?"
            violation = Violation("plan", seen, expected, hint if lost else "")
            broken.setdefault(law, [violation])
        if broken:
            break  # the smallest model that shows a fault says enough
    for law in right:
        sheet.verify(law, broken.get(law, []))
    for cap_bytes in (0, -1):
        try:
            plan = plan_buckets([_param(2, torch.float32)], cap_bytes)
        except ValueError:
            sheet.expect(REFUSED, True)
        else:
            seen = f"plan_buckets(params, {cap_bytes}) returned {plan!r}"
            sheet.expect(REFUSED, False, seen=seen, expected="ValueError")


def random_models() -> Iterator[tuple[list[nn.Parameter], int]]:
    """(parameters in registration order, cap in bytes): the same ones every time."""
    draw = random.Random(6)
    # Element counts 3, 10, 1, 1, 1, 6 with room for 4: the over-size gradients stand
    # first, in the middle and last.
    yield [_param(n, torch.float32) for n in (3, 10, 1, 1, 1, 6)], 4 * KIB
    for number in range(NUM_MODELS - 1):
        mixed = number % 3 == 0
        params = [
            _param(
                draw.choice((1, 1, 2, 3, 5, 8, 13, 40)),
                draw.choice(DTYPES) if mixed else DTYPES[number % 2],
                trainable=draw.random() > 0.15,
            )
            for _ in range(1 + number * 30 // NUM_MODELS)
        ]
        yield params, draw.choice((1, 4, 9, 20, 64, 10_000)) * KIB


def broken_laws(
    plan: Plan, params: Sequence[nn.Parameter], cap_bytes: int
) -> Iterator[tuple[Any, ...]]:
    """Each law that `plan` breaks, what is wrong, and the right order of a bucket."""
    trainable = [i for i, p in enumerate(params) if p.requires_grad]
    placed = [i for bucket in plan for i in bucket]
    missing = [i for i in trainable if i not in placed]
    twice = sorted({i for i in placed if placed.count(i) > 1})
    wrong = sorted(set(placed) - set(trainable))
    if missing or twice or wrong:
        facts = {
            "in no bucket": missing,
            "in more than one bucket": twice,
            "frozen or no position at all": wrong,
        }
        yield ONCE, "; ".join(f"{text}: {i}" for text, i in facts.items() if i)
    if [] in plan:
        yield FULL, f"bucket {plan.index([])} is empty"
    if wrong or [] in plan:
        return
    for b, bucket in enumerate(plan):
        dtypes = sorted({str(params[i].dtype) for i in bucket})
        if len(dtypes) > 1:
            yield DTYPE, f"bucket {b} holds {' and '.join(dtypes)}"
            return
    for b, bucket in enumerate(plan):
        backward = sorted(bucket, reverse=True)
        if bucket != backward:
            yield ARRIVAL, f"bucket {b} is {bucket}", *backward
            return
    if not missing and not twice:
        for dtype in dict.fromkeys(params[bucket[0]].dtype for bucket in plan):
            yield from _broken_filling(plan, params, cap_bytes, dtype)
    full_at = [min(bucket) for bucket in plan]  # the last arrival fills a bucket
    for b, (before, at) in enumerate(itertools.pairwise(full_at), start=1):
        if at > before:
            yield (
                LAUNCH,
                f"bucket {b} is full when gradient {at} arrives, before "
                f"bucket {b - 1}, which waits for gradient {before}",
            )
            return


def _broken_filling(
    plan: Plan, params: Sequence[nn.Parameter], cap_bytes: int, dtype: torch.dtype
) -> Iterator[tuple[str, str]]:
    """The laws on what the buckets of one dtype take: RUN, CAP and MAXIMAL."""
    size = [p.numel() * p.element_size() for p in params]
    own = [b for b, bucket in enumerate(plan) if params[bucket[0]].dtype == dtype]
    own.sort(key=lambda b: -plan[b][0])
    total = {b: sum(size[i] for i in plan[b]) for b in own}
    order = [i for b in own for i in plan[b]]
    if order != sorted(order, reverse=True):
        yield RUN, f"the {dtype} buckets are {[plan[b] for b in own]}"
        return
    for b in own:
        if total[b] > cap_bytes and len(plan[b]) > 1:
            yield (
                CAP,
                f"bucket {b} holds {total[b]} bytes in {len(plan[b])} gradients, "
                f"the cap is {cap_bytes} bytes",
            )
            break
    for b, following in itertools.pairwise(own):
        first = plan[following][0]
        if 0 < size[first] <= cap_bytes - total[b]:
            yield (
                MAXIMAL,
                f"bucket {b} closed at {total[b]} bytes, though gradient {first} "
                f"({size[first]} bytes) fits under the cap of {cap_bytes}",
            )
            break


def _planned(
    plan_buckets: Callable[..., Any], params: list[nn.Parameter], cap_bytes: int
) -> Plan:
    """The learner's answer as lists of int; anything else is explained."""
    try:
        answer = plan_buckets(params, cap_bytes)
    except Exception as error:
        error.add_note(f"in plan_buckets on {_described(params, cap_bytes)}")
        raise
    try:
        return [[int(position) for position in bucket] for bucket in answer]
    except Exception as error:  # what a tensor says when it is taken for an int
        raise TypeError(
            f"plan_buckets returned {answer!r:.200}; expected a list of buckets, each "
            "a list of positions in `params`, such as [[3, 2], [1, 0]]"
        ) from error


def _described(params: Sequence[nn.Parameter], cap_bytes: int) -> str:
    sizes = ", ".join(
        f"{i}: {p.numel() * p.element_size() // KIB}"
        + ("" if p.dtype == torch.float32 else " bf16")
        + ("" if p.requires_grad else " frozen")
        for i, p in enumerate(params)
    )
    return f"parameters in KiB ({sizes}), cap {cap_bytes // KIB} KiB"


def _param(kib: int, dtype: torch.dtype, trainable: bool = True) -> nn.Parameter:
    """A parameter of `kib` KiB that takes no memory."""
    data = torch.empty(kib * KIB // dtype.itemsize, dtype=dtype, device="meta")
    return nn.Parameter(data, requires_grad=trainable)
