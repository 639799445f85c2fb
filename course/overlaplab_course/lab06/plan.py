"""Exercise 6.1: which gradients share a message. Laws on random models, not a list."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import Violation

ONCE = "every trainable parameter is in exactly one bucket, and no frozen one"
FULL = "no bucket is empty"
DTYPE = "no bucket mixes dtypes"
ARRIVAL = "inside a bucket, gradients stand in the order of their arrival"
RUN = "a bucket takes its dtype's gradients as they come and skips none"
CAP = "no bucket passes the cap, except one gradient alone"
MAXIMAL = "no bucket closes while its dtype's next gradient would still fit"
LAUNCH = "buckets stand in the order in which they become full"
REFUSED = "a cap of zero or less is refused with a ValueError"

NUM_MODELS = 200
KIB = 1024
DTYPES = (torch.float32, torch.bfloat16)

Plan = list[list[int]]


@exercise(
    "6.1",
    title="the plan",
    solution="plan_buckets",
    verifies=(ONCE, FULL, DTYPE, ARRIVAL, RUN, CAP, MAXIMAL, LAUNCH, REFUSED),
    points=2,
    timeout_s=20.0,
)
def grade_plan(sheet: Sheet, plan_buckets: Callable[..., Any]) -> None:
    """Hold the plan to its laws on `NUM_MODELS` models, small ones first."""
    sheet.ran(f"plan_buckets on {NUM_MODELS} random models and caps")
    broken: dict[str, Violation] = {}
    for params, cap_bytes in random_models():
        plan = _called(plan_buckets, params, cap_bytes)
        for law, message, expected, hint in broken_laws(plan, params, cap_bytes):
            seen = f"{_described(params, cap_bytes)}\nyour plan: {plan}\n{message}"
            broken.setdefault(law, Violation("plan", seen, expected, hint))
        if broken:
            break  # the smallest model that shows a fault says enough
    for law in (ONCE, FULL, DTYPE, ARRIVAL, RUN, CAP, MAXIMAL, LAUNCH):
        sheet.verify(law, [broken[law]] if law in broken else [])
    _grade_refusal(sheet, plan_buckets)


def random_models(
    num_models: int = NUM_MODELS,
) -> Iterator[tuple[list[nn.Parameter], int]]:
    """(parameters in registration order, cap in bytes): the same ones every time."""
    draw = random.Random(6)
    # Element counts 3, 10, 1, 1, 1, 6 with room for 4: the over-size gradients stand
    # first, in the middle and last.
    yield [_param(n, torch.float32) for n in (3, 10, 1, 1, 1, 6)], 4 * KIB
    for number in range(num_models - 1):
        num_params = 1 + number * 30 // num_models
        mixed = number % 3 == 0
        params = [
            _param(
                draw.choice((1, 1, 2, 3, 5, 8, 13, 40)),
                draw.choice(DTYPES) if mixed else DTYPES[number % 2],
                trainable=draw.random() > 0.15,
            )
            for _ in range(num_params)
        ]
        yield params, draw.choice((1, 4, 9, 20, 64, 10_000)) * KIB


def broken_laws(
    plan: Plan, params: Sequence[nn.Parameter], cap_bytes: int
) -> Iterator[tuple[str, str, str, str]]:
    """(law, what is wrong, what was expected, hint) for each law that `plan` breaks."""
    trainable = [i for i, p in enumerate(params) if p.requires_grad]
    placed = [i for bucket in plan for i in bucket]
    missing = [i for i in trainable if i not in placed]
    twice = sorted({i for i in placed if placed.count(i) > 1})
    wrong = sorted({i for i in placed if i not in trainable})
    if missing or twice or wrong:
        facts = (
            (missing, "in no bucket"),
            (twice, "in more than one bucket"),
            (wrong, "frozen or no position at all"),
        )
        message = "; ".join(f"{text}: {which}" for which, text in facts if which)
        hint = "what happens to the bucket that is still open after the last one?"
        yield ONCE, message, "each once", hint if missing else ""
    empty = [b for b, bucket in enumerate(plan) if not bucket]
    if empty:
        hint = "close a bucket only if there is something in it"
        yield FULL, f"bucket {empty[0]} is empty", "one gradient at least", hint
    if wrong or empty:
        return
    for b, bucket in enumerate(plan):
        dtypes = sorted({str(params[i].dtype) for i in bucket})
        if len(dtypes) > 1:
            hint = "keep one open bucket a dtype"
            yield DTYPE, f"bucket {b} holds {' and '.join(dtypes)}", "one dtype", hint
            return
    for b, bucket in enumerate(plan):
        if bucket != sorted(bucket, reverse=True):
            hint = "the backward pass meets the last registered parameter first"
            backward = str(sorted(bucket, reverse=True))
            yield ARRIVAL, f"bucket {b} is {bucket}", backward, hint
            return
    if not missing and not twice:
        yield from _broken_filling(plan, params, cap_bytes)
    full_at = [min(bucket) for bucket in plan]  # the last arrival fills a bucket
    for b in range(1, len(plan)):
        if full_at[b] > full_at[b - 1]:
            yield (
                LAUNCH,
                f"bucket {b} is full when gradient {full_at[b]} arrives, before "
                f"bucket {b - 1}, which waits for gradient {full_at[b - 1]}",
                "the bucket that is full first stands first",
                "sort the buckets by their last arrival",
            )
            return


def _broken_filling(
    plan: Plan, params: Sequence[nn.Parameter], cap_bytes: int
) -> Iterator[tuple[str, str, str, str]]:
    """The laws on what a bucket takes: RUN, CAP and MAXIMAL."""
    size = {i: p.numel() * p.element_size() for i, p in enumerate(params)}
    for dtype in dict.fromkeys(params[bucket[0]].dtype for bucket in plan):
        chosen = [
            b for b, bucket in enumerate(plan) if params[bucket[0]].dtype == dtype
        ]
        chosen.sort(key=lambda b: -plan[b][0])
        order = [i for b in chosen for i in plan[b]]
        if order != sorted(order, reverse=True):
            hint = "a bucket that was closed stays closed; an open one takes the next"
            buckets = [plan[b] for b in chosen]
            yield (
                RUN,
                f"the {dtype} buckets are {buckets}",
                "consecutive arrivals",
                hint,
            )
            continue
        for b in chosen:
            total = sum(size[i] for i in plan[b])
            if total > cap_bytes and len(plan[b]) > 1:
                message = (
                    f"bucket {b} holds {total} bytes in {len(plan[b])} gradients, "
                    f"the cap is {cap_bytes} bytes"
                )
                hint = "bytes = numel() * element_size(); close before it would pass"
                yield CAP, message, f"at most {cap_bytes}, or one gradient alone", hint
                break
        for b, following in itertools.pairwise(chosen):
            total = sum(size[i] for i in plan[b])
            first = plan[following][0]
            if 0 < size[first] <= cap_bytes - total:
                message = (
                    f"bucket {b} closed at {total} bytes, though gradient {first} "
                    f"({size[first]} bytes) fits under the cap of {cap_bytes}"
                )
                yield MAXIMAL, message, "it takes every gradient that fits", ""
                break


def _grade_refusal(sheet: Sheet, plan_buckets: Callable[..., Any]) -> None:
    params = [_param(2, torch.float32)]
    for cap_bytes in (0, -1):
        try:
            plan = plan_buckets(params, cap_bytes)
        except ValueError:
            sheet.expect(REFUSED, True)
        else:
            sheet.expect(
                REFUSED,
                False,
                seen=f"plan_buckets(params, {cap_bytes}) returned {plan!r}",
                expected="ValueError",
                hint="raise ValueError before you plan anything",
            )


def _called(
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
