"""The graders of what lab 06 plans: which gradients share a message (6.1), and how
large a bucket is (6.4a).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import Violation, regret, regret_law
from overlaplab_course.lab06.given import MIB, pack

# -- 6.1: laws on random models, not a list

ONCE = "every trainable parameter is in exactly one bucket, and no frozen one"
FULL = "no bucket is empty"
DTYPE = "no bucket mixes dtypes"
ARRIVAL = "inside a bucket, gradients stand in the order of their arrival"
RUN = "a bucket takes its dtype's gradients as they come and skips none"
CAP = "no bucket passes the cap, except one gradient alone"
MAXIMAL = "no bucket closes while its dtype's next gradient would still fit"
LAUNCH = "buckets stand in the order in which they become full"
REFUSED = "a cap of zero or less is refused with a ValueError"
# What each law expects, and a hint.
PLAN_LAWS: Mapping[str, tuple[str, str]] = {
    ONCE: (
        "each once",
        "what happens to the bucket that is still open after the last one?",
    ),
    FULL: ("one gradient at least", "close a bucket only if there is something in it"),
    DTYPE: ("one dtype", "keep one open bucket a dtype"),
    ARRIVAL: ("", "the backward pass meets the last registered parameter first"),
    RUN: (
        "consecutive arrivals",
        "a bucket that was closed stays closed; an open one takes the next",
    ),
    CAP: ("", "bytes = numel() * element_size(); close before it would pass"),
    MAXIMAL: ("it takes every gradient that fits", ""),
    LAUNCH: (
        "the bucket that is full first stands first",
        "sort the buckets by their last arrival",
    ),
}

NUM_MODELS = 200
KIB = 1024
DTYPES = (torch.float32, torch.bfloat16)

Plan = list[list[int]]
# A law, what is wrong; and what is right, where that depends on the plan.
Broken = tuple[str, str] | tuple[str, str, str]


@exercise(
    "6.1",
    title="the plan",
    solution="plan_buckets",
    verifies=(*PLAN_LAWS, REFUSED),
    points=2,
    timeout_s=20.0,
)
def grade_plan(sheet: Sheet, plan_buckets: Callable[..., Any]) -> None:
    """Hold the plan to its laws on `NUM_MODELS` models, small ones first."""
    sheet.ran(f"plan_buckets on {NUM_MODELS} random models and caps")
    broken: dict[str, list[Violation]] = {}
    for params, cap_bytes in random_models():
        plan = _planned(plan_buckets, params, cap_bytes)
        for law, message, *right in broken_laws(plan, params, cap_bytes):
            seen = f"{_described(params, cap_bytes)}\nyour plan: {plan}\n{message}"
            expected, hint = PLAN_LAWS[law]
            if law == ONCE and "in no bucket" not in message:
                hint = ""
            violation = Violation("plan", seen, right[0] if right else expected, hint)
            broken.setdefault(law, [violation])
        if broken:
            break  # the smallest model that shows a fault says enough
    for law in PLAN_LAWS:
        sheet.verify(law, broken.get(law, []))
    for cap_bytes in (0, -1):
        try:
            plan = plan_buckets([_param(2, torch.float32)], cap_bytes)
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
) -> Iterator[Broken]:
    """Each law that `plan` breaks and how."""
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
        message = "; ".join(
            f"{text}: {which}" for text, which in facts.items() if which
        )
        yield ONCE, message
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
            yield ARRIVAL, f"bucket {b} is {bucket}", str(backward)
            return
    if not missing and not twice:
        for dtype in dict.fromkeys(params[bucket[0]].dtype for bucket in plan):
            yield from _broken_filling(plan, params, cap_bytes, dtype)
    full_at = [min(bucket) for bucket in plan]  # the last arrival fills a bucket
    for b in range(1, len(plan)):
        if full_at[b] > full_at[b - 1]:
            yield (
                LAUNCH,
                f"bucket {b} is full when gradient {full_at[b]} arrives, before "
                f"bucket {b - 1}, which waits for gradient {full_at[b - 1]}",
            )
            return


def _broken_filling(
    plan: Plan, params: Sequence[nn.Parameter], cap_bytes: int, dtype: torch.dtype
) -> Iterator[Broken]:
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
                f"at most {cap_bytes}, or one gradient alone",
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


# -- 6.4a: a choice is marked by what it loses, on pairs where every constant fails

AT_MOST = 0.20
LEAST_BYTES = 1024  # nobody means less
REGRET = "on each pair, at most a fifth of what there was to gain is lost"
USABLE = "each answer is a positive number of bytes"


@dataclass(frozen=True, slots=True)
class Case:
    """One backward pass and one link; none of them is in the lesson.

    Args:
        name: what the model and the link are like.
        grad_bytes: size of each gradient, in the order of arrival.
        ready_ns: when each is ready, from the start of the backward pass.
        latency_ns: alpha, the fixed cost of a message.
        bytes_per_s: payload a second, as the all-reduce of a large message sees it.
    """

    name: str
    grad_bytes: tuple[int, ...]
    ready_ns: tuple[int, ...]
    latency_ns: int
    bytes_per_s: int

    def step_ns(self, cap_bytes: float) -> int:
        """From the start of the backward pass to the end of the last message.

        The same number as `replay` gives, which a test holds it to, in microseconds.
        """
        end_ns = 0
        for bucket in pack(self.grad_bytes, cap_bytes):
            total = sum(self.grad_bytes[i] for i in bucket)
            start_ns = max(end_ns, self.ready_ns[bucket[-1]])
            wire_ns = -(-total * 10**9 // self.bytes_per_s)
            end_ns = start_ns + self.latency_ns + wire_ns
        return end_ns

    @lru_cache(maxsize=64)  # noqa: B019 (a case is a few numbers, and there are twelve)
    def best_cap_bytes(self) -> int:
        """Of 120 caps in equal ratios, smallest gradient to all, the one to take."""
        low, high = min(self.grad_bytes), sum(self.grad_bytes)
        caps = (int(low * (high / low) ** (k / 119)) + 1 for k in range(120))
        return min(caps, key=self.step_ns)

    def worst_ns(self) -> int:
        """The worse of the two ends: one message per gradient, one for all."""
        return max(self.step_ns(1), self.step_ns(sum(self.grad_bytes)))

    def regret(self, cap_bytes: float) -> float:
        """0: as good as the best; 1: as bad as the worse end."""
        best_ns = self.step_ns(self.best_cap_bytes())
        return regret(self.step_ns(cap_bytes), best_ns, self.worst_ns())


def _gpt(
    layers: int, d: int, tokens: int, *, tflops: float = 500, vocabulary: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gradient sizes and ready times of a transformer's backward pass, in bfloat16."""
    block = (4 * d * d, 4 * d * d, d, d * d, 3 * d * d, d)  # in the order of arrival
    return _backward(block * layers, tokens, tflops, 2, vocabulary * d)


def _backward(
    numels: Sequence[int], tokens: int, tflops: float, itemsize: int, last: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """An embedding of `last` elements, if any, arrives last and costs no time."""
    took = (max(3_000, int(4 * numel * tokens / tflops / 1000)) for numel in numels)
    ready_ns = [*itertools.accumulate(took)]
    if last:
        numels, ready_ns = (*numels, last), [*ready_ns, ready_ns[-1]]
    return tuple(numel * itemsize for numel in numels), tuple(ready_ns)


def cases() -> tuple[Case, ...]:
    """The twelve pairs."""
    medium, large = "GPT of 24 x 1024", "GPT of 48 x 2048"
    embedding = "GPT of 12 x 2048 with an embedding of 32k rows, 150 us"
    narrow = _backward((512, 512 * 512) * 100, 8192, 60, 4)  # in float32
    ethernet, slow_start = (100_000, 8_300_000_000), (500_000, 100_000_000_000)
    nvlink, infiniband = (44_000, 220_000_000_000), (20_000, 33_000_000_000)
    far, distant = (1_000_000, 1_000_000_000), (150_000, 300_000_000_000)
    slow = (300_000, 200_000_000_000)
    chosen = (
        (f"{medium}, 2k tokens, 500 us", _gpt(24, 1024, 2048), slow_start),
        (f"{medium}, 2k tokens, Ethernet", _gpt(24, 1024, 2048), ethernet),
        (f"{medium}, 2k tokens, NVLink", _gpt(24, 1024, 2048), nvlink),
        (f"{medium}, 8k tokens, NVLink", _gpt(24, 1024, 8192), nvlink),
        (f"{medium}, 8k tokens, InfiniBand", _gpt(24, 1024, 8192), infiniband),
        (f"{large}, 4k tokens, 1 GB/s", _gpt(48, 2048, 4096), far),
        (f"{large}, 4k tokens, 500 us", _gpt(48, 2048, 4096), slow_start),
        (
            "GPT of 6 x 256, 8k tokens, Ethernet",
            _gpt(6, 256, 8192, tflops=50),
            ethernet,
        ),
        ("GPT of 24 x 256, 2k tokens, NVLink", _gpt(24, 256, 2048, tflops=50), nvlink),
        ("100 narrow layers, 8k tokens, Ethernet", narrow, ethernet),
        ("GPT of 12 x 512, 2k tokens, 300 us", _gpt(12, 512, 2048, tflops=50), slow),
        (embedding, _gpt(12, 2048, 2048, vocabulary=32_768), distant),
    )
    return tuple(Case(name, *model, *link) for name, model, link in chosen)


@exercise(
    "6.4a",
    title="choose the size",
    solution="choose_cap",
    verifies=(USABLE, REGRET),
    points=2,
    timeout_s=30.0,
)
def grade_choice(sheet: Sheet, choose_cap: Callable[..., Any]) -> None:
    """Ask for a cap on each case and compare with the best of a sweep."""
    sheet.ran("choose_cap on 12 pairs of a model and a link, 4 ranks, alpha-beta")
    lost: dict[str, float] = {}
    smallest = float("inf")
    for case in cases():
        sizes, ready_ns = list(case.grad_bytes), list(case.ready_ns)
        answer = choose_cap(sizes, ready_ns, case.latency_ns, case.bytes_per_s)
        try:
            cap_bytes = float(answer)
        except (TypeError, ValueError):
            cap_bytes = 0.0
        sheet.expect(
            USABLE,
            0 < cap_bytes < float("inf"),
            seen=f"{case.name}: choose_cap returned {answer!r}",
            expected="a number of bytes above 0, such as 26214400 (25 MiB)",
        )
        sheet.stop_if_wrong()
        smallest = min(smallest, cap_bytes)
        best = case.best_cap_bytes()
        described = (
            f"{case.name}: {cap_bytes / MIB:.1f} MiB takes "
            f"{case.step_ns(cap_bytes) / 1e6:.2f} ms, {best / MIB:.1f} MiB takes "
            f"{case.step_ns(best) / 1e6:.2f}, the worse end {case.worst_ns() / 1e6:.2f}"
        )
        lost[described] = case.regret(cap_bytes)
    wrong = regret_law(lost, at_most=AT_MOST)
    if smallest < LEAST_BYTES:
        hint = "the answer is in bytes, not MiB and not a number of buckets"
        wrong = [replace(violation, hint=hint) for violation in wrong]
    sheet.verify(REGRET, wrong)
