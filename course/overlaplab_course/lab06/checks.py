"""The graders of lab 06: of the line, the plan, choices, readings and settings.

Those of hooks, finish and repairs stand in `reducer_checks`.
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

from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import KnobTask, KnobTasks, Settings, need_dict
from overlaplab.grading.laws import Violation, regret, regret_law
from overlaplab_course.lab06 import reducer_checks  # noqa: F401 (registers exercises)
from overlaplab_course.lab06.given import MIB, pack, three_runs
from overlaplab_course.lab06.show import message_points
from overlaplab_course.lab06.trials import KNOBS, DdpRun, net_bytes, try_with, turn

# -- 6.0: any way of fitting will do

FIT = "alpha and bandwidth meet 0, 25 and 100 MiB within 10 %"
MISSED = "which measured point the line misses most"


@exercise(
    "6.0",
    title="what a message costs",
    solution=("latency_us", "gbyte_per_s", "missed_mib"),
    verifies=(FIT, MISSED),
    points=1,
    timeout_s=10.0,
)
def grade_fit(
    sheet: Sheet, latency_us: float, gbyte_per_s: float, missed_mib: float
) -> None:
    """Compare the learner's line with the measured points."""
    sheet.ran("your line at the five measured sizes")
    points = message_points()
    off = {}
    for mib, measured_us in points.items():
        predicted_us = float(latency_us) + mib * MIB / (float(gbyte_per_s) * 1e3)
        off[mib] = predicted_us / measured_us - 1
        if mib in (0, 25, 100):
            sheet.expect(
                FIT,
                abs(off[mib]) <= 0.10,
                seen=f"at {mib} MiB the line says {predicted_us:.0f} us, measured are "
                f"{measured_us:.0f} us",
                expected="within 10 %",
                hint="an empty message shows alpha; the slope from 25 to 100 MiB is "
                "75 MiB more in 357 us more",
            )
    sheet.expect(
        MISSED,
        missed_mib == max(points, key=lambda mib: abs(off[mib])),
        seen=f"at {missed_mib} MiB your line is off by {off.get(missed_mib, 0):+.0%}",
        expected="the size at which it is off most",
    )


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


# -- 6.4b

LARGEST = "the largest share of each critical path"
COUNTERFACTUAL = "what half the latency saves in each run, within 3 points"
TAIL = "whose bytes are still on the wire when run C has nothing left to compute"


@exercise(
    "6.4b",
    title="read the critical path",
    solution="reading",
    verifies=(LARGEST, COUNTERFACTUAL, TAIL),
    points=2,
    timeout_s=120.0,  # records the three runs if nobody has
)
def grade_reading(sheet: Sheet, reading: Mapping[str, Any]) -> None:
    """Compare with the shares, and with what the resolver says of half the latency."""
    sheet.ran("runs A, B and C, each again with half the latency")
    need_dict(reading, "reading")
    wrong: dict[str, list[Violation]] = {LARGEST: [], COUNTERFACTUAL: []}
    for letter, given in three_runs().items():
        timeline = given.timeline()
        shares = timeline.critical_path().shares
        saved = 1 - given.timeline(latency=0.5).step_ns / timeline.step_ns
        answer = reading.get(letter)
        said = answer if isinstance(answer, Mapping) else {}
        for violation in laws.diagnosis_law(
            said, {"largest": max(shares, key=lambda share: shares[share])}
        ):
            message = f"run {letter} ({given.name}): {violation.message}"
            expected = f"the largest value in critical_path().shares of run {letter}"
            hint = "max() over timeline.critical_path().shares, not over the lanes"
            wrong[LARGEST].append(Violation("diagnosis", message, expected, hint))
        for violation in laws.diagnosis_law(
            said, {"half_latency_saves_percent": 100 * saved}
        ):
            message = f"run {letter}: {violation.message}"
            expected = (
                f"percent of the step, from .timeline(latency=0.5) of run {letter}"
            )
            hint = "time it again: compare step_ns with .timeline(latency=0.5)"
            wrong[COUNTERFACTUAL].append(
                Violation("diagnosis", message, expected, hint)
            )
    for sentence, violations in wrong.items():
        sheet.verify(sentence, violations, list_all=True)
    owner = three_runs()["C"].messages()[-1].names[-1]
    truth = {"tail": frozenset({owner, f"grad {owner}", owner.partition(".")[0]})}
    hint = "which collective ends last, and what are its parts called?"
    tail = [replace(v, hint=hint) for v in laws.diagnosis_law(reading, truth)]
    sheet.verify(TAIL, tail)


# -- 6.6: a setting is known by its messages, its copies and its step

WISHES = ("one message", "no copies", "unused parameter", "short step")
KNOWN = "every wish has keyword arguments that DDP takes"
ONE = "'one message': the third step sends all its gradients in one message"
NO_COPIES = "'no copies': the third step copies no gradient into a bucket"
UNUSED = "'unused parameter': a layer that gets no gradient does not stop the training"
SHORT = "'short step': at most a fifth of what there was to gain is lost"


@exercise(
    "6.6",
    title="settings of DDP",
    solution="wishes",
    verifies=(KNOWN, ONE, NO_COPIES, UNUSED, SHORT),
    points=1,
    optional=True,
    timeout_s=120.0,
)
def grade_settings(sheet: Sheet, wishes: Mapping[str, Mapping[str, Any]]) -> None:
    """Run DDP with what the learner chose for each wish."""
    sheet.ran("DDP, three steps of a small transformer on 2 ranks, for each wish")
    runs = {}
    for wish in WISHES:
        settings = wishes.get(wish) if isinstance(wishes, Mapping) else None
        if not isinstance(settings, Mapping):
            sheet.expect(KNOWN, False, seen=f"no settings for {wish!r}")
            continue
        runs[wish] = try_with(settings, uses_all=wish != "unused parameter")
        usable = not runs[wish].error or wish == "unused parameter"
        sheet.expect(KNOWN, usable, seen=f"{wish!r}: {_line(runs[wish])}")
    sheet.stop_if_wrong()
    one, copies, unused, short = (runs[wish] for wish in WISHES)
    sheet.expect(
        ONE,
        len(one.messages) == 1 and one.messages[0] >= net_bytes(),
        seen=_line(one),
        expected=f"one message of {net_bytes() / MIB:.2f} MiB",
    )
    sheet.expect(NO_COPIES, copies.copies == 0, seen=_line(copies), expected="0 copies")
    sheet.expect(
        UNUSED,
        not unused.error,
        seen=_line(unused),
        expected="three steps",
        hint="DDP has to look for parameters without gradient, if you ask it to",
    )
    best, worst = best_ns(), worst_ns()
    sheet.expect(
        SHORT,
        regret(short.step_ns, best, worst) <= 0.20,
        seen=f"{_line(short)}; the best size takes {best / 1e6:.1f} ms",
        expected=f"at most {(best + 0.2 * (worst - best)) / 1e6:.1f} ms",
        hint="n* = sqrt(Tb / alpha), then M / n*",
    )


def _line(found: DdpRun) -> str:
    """The line without its columns."""
    return " ".join(str(found).split())


# A test holds these two to a longer list of sizes.


def best_ns() -> int:
    """The step with buckets of a good size."""
    return try_with({"bucket_cap_mb": 0.3}).step_ns


def worst_ns() -> int:
    """The step with one message, the worse end."""
    return try_with({"bucket_cap_mb": 25}).step_ns


# -- 6.7

HALF, TWICE = turn.what_if
TASKS = KnobTasks(
    turn,
    usable="every setting is one that the sliders have",
    measure=lambda s: {
        "half": turn.saved_percent(s, HALF),
        "twice": turn.saved_percent(s, TWICE),
    },
    seen="half the latency saves {half:.1f} %, twice the bandwidth {twice:.1f} %",
    tasks=(
        KnobTask(
            "latency",
            "half the latency saves 15 % or more, twice the bandwidth under 8 %",
            lambda n: n["half"] >= 15 and n["twice"] < 8,
        ),
        KnobTask(
            "bandwidth",
            "twice the bandwidth saves 15 % or more, half the latency under 8 %",
            lambda n: n["twice"] >= 15 and n["half"] < 8,
        ),
        KnobTask(
            "neither",
            "neither saves 2 %",
            lambda n: n["half"] < 2 and n["twice"] < 2,
        ),
        KnobTask(
            "25 MiB loses",
            "buckets of 25 MiB take 10 % longer than the best bucket",
            lambda n: n["lost"] >= 10,
            seen="25 MiB takes {lost:.1f} % longer than the best",
            expected="10 % or more",
            hint="when is latency expensive, and when is there little to hide behind?",
            measure=lambda s: {"lost": lost_percent(s)},
        ),
    ),
)
SETTINGS, IS_LATENCY, IS_WIRE, IS_NEITHER, IS_LOST = TASKS.sentences


def lost_percent(settings: Settings) -> float:
    """How much longer 25 MiB takes than the best bucket of the slider, in percent."""
    sizes = KNOBS["bucket_mib"].values
    steps = {mib: turn(**{**settings, "bucket_mib": mib}).step_ns for mib in sizes}
    return 100 * (steps[25] / min(steps.values()) - 1)


@exercise(
    "6.7",
    title="knobs",
    solution="found",
    verifies=TASKS.sentences,
    points=2,
    optional=True,
    timeout_s=30.0,
)
def grade_knobs(sheet: Sheet, found: Settings) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your four settings, each resolved again")
    TASKS.grade(sheet, found)
