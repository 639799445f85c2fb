"""Exercise 6.4a: choose the bucket size, graded by what the choice costs.

Twelve pairs of a model and a link, none of them in the lesson. A choice is marked by
its regret: what was lost relative to what there was to gain. On these pairs every
constant answer fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import regret, regret_law
from overlaplab.hardware import Hardware, find_hardware, with_link
from overlaplab.program import PayloadTensor, Program, ProgramBuilder

MIB = 2**20
NUM_RANKS = 4
AT_MOST = 0.20
LEAST_BYTES = 1024  # nobody means less
REGRET = "on each pair, at most a fifth of what there was to gain is lost"
USABLE = "each answer is a positive number of bytes"


@dataclass(frozen=True, slots=True)
class Case:
    """One backward pass and one link.

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

        The same number as `resolve(self.program(), self.hardware())` after `replay`
        with this cap, which a test holds it to; here it takes microseconds.
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
        """Of 120 caps from the smallest gradient to all, the one with least step."""
        return min(self.caps(), key=self.step_ns)

    def worst_ns(self) -> int:
        """The worse of the two ends: a message a gradient, one message for all."""
        return max(self.step_ns(1), self.step_ns(sum(self.grad_bytes)))

    def regret(self, cap_bytes: float) -> float:
        """0: as good as the best; 1: as bad as the worse end."""
        best_ns = self.step_ns(self.best_cap_bytes())
        return regret(self.step_ns(cap_bytes), best_ns, self.worst_ns())

    def caps(self, count: int = 120) -> list[int]:
        """`count` caps in equal ratios, from the smallest gradient to all of them."""
        low, high = min(self.grad_bytes), sum(self.grad_bytes)
        return [int(low * (high / low) ** (k / (count - 1))) + 1 for k in range(count)]

    def program(self) -> Program:
        """One message a gradient, for `replay` to group."""
        builder = ProgramBuilder(num_ranks=1, represents=NUM_RANKS)
        before_ns = 0
        for i, (size, ready_ns) in enumerate(
            zip(self.grad_bytes, self.ready_ns, strict=True)
        ):
            op = None
            if ready_ns > before_ns:
                op = builder.compute(0, f"backward {i}", ns=ready_ns - before_ns)
            part = PayloadTensor(size, "float32", op, f"gradient {i}")
            builder.collective(0, "all_reduce", payload=[part])
            before_ns = ready_ns
        return builder.build()

    def hardware(self) -> Hardware:
        """`chalk` (no launch cost, no contention) with this link."""
        crossings = 2 * (NUM_RANKS - 1) / NUM_RANKS
        bus_bytes_per_s = int(self.bytes_per_s * crossings)
        return with_link(
            find_hardware("chalk"),
            latency_ns=self.latency_ns,
            bytes_per_s=bus_bytes_per_s,
        )


def pack(grad_bytes: Sequence[int], cap_bytes: float) -> list[list[int]]:
    """First come, first served, up to the cap; an over-size gradient alone."""
    buckets: list[list[int]] = []
    room = 0.0
    for i, size in enumerate(grad_bytes):
        if not buckets or size > room:
            buckets.append([])
            room = cap_bytes
        buckets[-1].append(i)
        room -= size
    return buckets


def gpt(
    layers: int,
    width: int,
    tokens: int,
    *,
    tflops: float = 500,
    itemsize: int = 2,
    vocabulary: int = 0,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gradient sizes and ready times of a transformer's backward pass.

    The embedding of `vocabulary` rows, if any, arrives last and costs no time.
    """
    d = width
    block = (4 * d * d, 4 * d * d, d, d * d, 3 * d * d, d)  # in the order of arrival
    return _backward(block * layers, tokens, tflops, itemsize, vocabulary * d)


def narrow(layers: int, width: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Many small linear layers, each with a bias, in fp32."""
    return _backward((width, width * width) * layers, tokens, 60, 4, 0)


def _backward(
    numels: Sequence[int], tokens: int, tflops: float, itemsize: int, last_numel: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    now_ns = 0
    ready_ns = []
    for numel in numels:
        now_ns += max(3_000, int(4 * numel * tokens / tflops / 1000))
        ready_ns.append(now_ns)
    if last_numel:
        numels = (*numels, last_numel)
        ready_ns.append(now_ns)
    return tuple(numel * itemsize for numel in numels), tuple(ready_ns)


def cases() -> tuple[Case, ...]:
    """The twelve pairs."""
    medium = "GPT of 24 x 1024"
    large = "GPT of 48 x 2048"
    ethernet, slow_start = (100_000, 8_300_000_000), (500_000, 100_000_000_000)
    nvlink, infiniband = (44_000, 220_000_000_000), (20_000, 33_000_000_000)
    far, distant = (1_000_000, 1_000_000_000), (150_000, 300_000_000_000)
    slow = (300_000, 200_000_000_000)
    chosen = (
        (f"{medium}, 2k tokens, 500 us", gpt(24, 1024, 2048), slow_start),
        (f"{medium}, 2k tokens, Ethernet", gpt(24, 1024, 2048), ethernet),
        (f"{medium}, 2k tokens, NVLink", gpt(24, 1024, 2048), nvlink),
        (f"{medium}, 8k tokens, NVLink", gpt(24, 1024, 8192), nvlink),
        (f"{medium}, 8k tokens, InfiniBand", gpt(24, 1024, 8192), infiniband),
        (f"{large}, 4k tokens, 1 GB/s", gpt(48, 2048, 4096), far),
        (f"{large}, 4k tokens, 500 us", gpt(48, 2048, 4096), slow_start),
        ("GPT of 6 x 256, 8k tokens, Ethernet", gpt(6, 256, 8192, tflops=50), ethernet),
        ("GPT of 24 x 256, 2k tokens, NVLink", gpt(24, 256, 2048, tflops=50), nvlink),
        ("100 narrow layers, 8k tokens, Ethernet", narrow(100, 512, 8192), ethernet),
        ("GPT of 12 x 512, 2k tokens, 300 us", gpt(12, 512, 2048, tflops=50), slow),
        (
            "GPT of 12 x 2048 with an embedding of 32k rows, 150 us",
            gpt(12, 2048, 2048, vocabulary=32_768),
            distant,
        ),
    )
    return tuple(
        Case(name, sizes, ready, *link) for name, (sizes, ready), link in chosen
    )


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
        answer = choose_cap(
            list(case.grad_bytes),
            list(case.ready_ns),
            case.latency_ns,
            case.bytes_per_s,
        )
        cap_bytes = _number(answer)
        usable = cap_bytes is not None and cap_bytes > 0
        sheet.expect(
            USABLE,
            usable,
            seen=f"{case.name}: choose_cap returned {answer!r}",
            expected="a number of bytes above 0, such as 26214400 (25 MiB)",
        )
        sheet.stop_if_wrong()
        assert cap_bytes is not None
        smallest = min(smallest, cap_bytes)
        best = case.best_cap_bytes()
        told = (
            f"{case.name}: {cap_bytes / MIB:.1f} MiB takes "
            f"{case.step_ns(cap_bytes) / 1e6:.2f} ms, {best / MIB:.1f} MiB takes "
            f"{case.step_ns(best) / 1e6:.2f}, the worse end {case.worst_ns() / 1e6:.2f}"
        )
        lost[told] = case.regret(cap_bytes)
    wrong = regret_law(lost, at_most=AT_MOST)
    if smallest < LEAST_BYTES:
        hint = "the answer is in bytes, not MiB and not a number of buckets"
        wrong = [replace(violation, hint=hint) for violation in wrong]
    sheet.verify(REGRET, wrong)


def _number(answer: object) -> float | None:
    """The answer as a float; None if it is no finite number."""
    try:
        number = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None
