"""Graders of lab 04's core, 4.1 to 4.4, and of 4.5. `checks_extra` has the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import Examined, judge_results
from overlaplab.grading.laws import Violation
from overlaplab.grading.violation import ms
from overlaplab.program import Program
from overlaplab.timeline import Timeline
from overlaplab_course.lab04 import given, reference
from overlaplab_course.lab04.checks_extra import LAB, wrong_results
from overlaplab_course.lab04.given import NUM_RANKS, WORLD, Inputs, play, wire_bytes

# -- 4.1

IN_PLACE, PARTS, BYTES, SIZES = LAB.sentences("4.1")

SumInPlace = Callable[[Tensor], Any]


def _sum_step(tensor: Tensor, sum_in_place: SumInPlace) -> Tensor:
    """What is graded: the tensor after `sum_in_place(tensor)`."""
    sum_in_place(tensor)
    return tensor


@LAB.grader("4.1")
def grade_in_two(sheet: Sheet, all_reduce_in_two: SumInPlace) -> None:
    """Values on every rank; bytes from the record; then sizes that do not divide."""
    for shape, num_ranks in [((400, 250), 4), *LAB.cases("4.1", "shapes")[SIZES]]:
        size = " x ".join(str(n) for n in shape)
        sheet.ran(f"your function on {size} elements, {num_ranks} ranks")
        inputs = [
            (torch.randn(*shape, generator=d),) for d in given.draws(7, num_ranks)
        ]
        seen = Examined(play(_sum_step, inputs, all_reduce_in_two))
        if shape == (400, 250):
            title = f"your run on {size} elements"
            sheet.show(seen.timeline, step_ns=seen.step_ns, title=title)
            sheet.verify(IN_PLACE, _wrong_sums(seen.values, inputs))
            sheet.verify(IN_PLACE, laws.origin_law(seen.program, what="the tensor"))
        else:
            sheet.verify(SIZES, _wrong_sums(seen.values, inputs))
            sheet.stop_if_wrong()
        sheet.verify(PARTS, _wrong_parts(seen.program))
        sheet.verify(BYTES, _wrong_bytes(seen.program, inputs))
        sheet.stop_if_wrong()


def _wrong_sums(seen: Sequence[Tensor], inputs: Inputs) -> list[Violation]:
    total = torch.stack([tensor for (tensor,) in inputs]).sum(0)
    named = [{"the tensor": value} for value in seen]
    found = laws.values_law(named, {"the tensor": total}, what="the value")
    if len(inputs) > 1 and any(
        torch.equal(before, value)
        for (before,), value in zip(inputs, seen, strict=True)
    ):
        hint = "the tensor itself did not change: write the result back into it"
        return [Violation(v.law, v.message, v.expected, hint) for v in found]
    return found


def _operations(program: Program) -> list[str]:
    return [op.collective.operation for op in program.ranks[0] if op.collective]


def _wrong_parts(program: Program) -> list[Violation]:
    used = _operations(program)
    message = f"rank 0 launched {', '.join(used)}"
    expected = "no all_reduce inside: it is what you build"
    return [Violation("parts", message, expected)] if "all_reduce" in used else []


def _wrong_bytes(program: Program, inputs: Inputs) -> list[Violation]:
    n, tensor = len(inputs), inputs[0][0]
    padded = -(-tensor.numel() // n) * n * tensor.itemsize
    wanted = wire_bytes("all_reduce", n, padded)
    found = []
    for rank in range(n):
        sent = given.sent_bytes(program, rank)
        if abs(sent - wanted) <= n:  # each count is rounded up
            continue
        used = ", ".join(_operations(program)) or "nothing"
        found.append(
            Violation(
                "bytes",
                f"{sent} bytes crossed the link of rank {rank} ({used})",
                f"{wanted}: 2 x {n - 1}/{n} of the tensor, padded to a multiple of "
                f"{n} elements",
                "which bytes travel that nobody needs?"
                if sent > wanted
                else "each rank needs the finished parts of all others",
            )
        )
    return found


# -- 4.2 and 4.3

VALUES, NO_RACE, WAITED, STEP = LAB.sentences("4.2")  # and of 4.3

Step = Callable[[Tensor, dict[str, Tensor]], Tensor]


@lru_cache(maxsize=4)
def best_ns(step: Step, inputs: Callable[[], Inputs]) -> int:
    """How long the course's own step takes."""
    return play(step, inputs()).timeline.step_ns


def _two_sums_oracle(inputs: Inputs) -> list[Tensor]:
    a = sum(x @ w["a"] for x, w in inputs)
    b = sum(x @ w["b"] for x, w in inputs)
    return [a @ w["d"] + b @ w["e"] + x @ w["c"] for x, w in inputs]


def _experts_oracle(inputs: Inputs) -> list[Tensor]:
    routed = sum(x @ w["routed_in"] for x, w in inputs)
    gate = sum(x @ w["gate"] for x, w in inputs)
    return [
        (routed @ w["routed_out"] + (x @ w["shared_in"]).relu() @ w["shared_out"])
        * gate
        for x, w in inputs
    ]


@LAB.grader("4.2")
def grade_waits(sheet: Sheet, two_sums: Step) -> None:
    """Right, safe, and as short as the dependencies allow."""
    best = best_ns(reference.two_sums, given.two_sums_inputs)
    _grade(sheet, two_sums, given.two_sums_inputs(), best, _two_sums_oracle)


@LAB.grader("4.3")
def grade_order(sheet: Sheet, experts: Step) -> None:
    """Any order and any stream will do, if the step is short."""
    best = best_ns(reference.experts, given.experts_inputs)
    inputs = given.experts_inputs()
    _grade(sheet, experts, inputs, best, _experts_oracle, largest_first=True)


def _grade(
    sheet: Sheet,
    step: Step,
    inputs: Inputs,
    best: int,
    oracle: Callable[[Inputs], list[Tensor]],
    *,
    largest_first: bool = False,
) -> None:
    """Judge a step.

    Args:
        best: the course's own step, in ns.
        oracle: from inputs to the right results, computed by one process.
        largest_first: only an order with the largest message first is short.
    """
    sheet.ran(f"your step on 4 ranks, {len(inputs[0][1])} matrices a rank")
    seen = Examined(play(step, inputs))
    seen.draw_on(sheet, best)
    unwaited = laws.no_findings_law(seen.findings, kinds=("unwaited",))
    races = laws.no_findings_law(seen.findings, kinds=("hazard", "unmatched"))
    sheet.verify(WAITED, unwaited)
    sheet.verify(NO_RACE, races)
    sheet.verify(VALUES, wrong_results(seen.values, oracle(inputs)))
    sheet.verify(VALUES, laws.origin_law(seen.program))
    sheet.stop_if_wrong()
    late = largest_first and _largest_is_late(seen.program)
    slow = laws.step_law(seen.step_ns, best)
    sheet.verify(STEP, [replace(v, hint=_order_hint(seen, late)) for v in slow])


def _order_hint(seen: Examined, late: bool) -> str:
    """What the lanes show: where does the compute stream stand still?"""
    if cpu_waits_ns(seen.run.timeline) > seen.step_ns // 10:
        return "the CPU itself waits: which call blocks it, and must it?"
    if seen.run.timeline.report().hidden_ns == 0:
        return "nothing is hidden: what could be computed while the message travels?"
    if late:
        return "launch the message with most behind it earlier"
    return "what does the compute stream wait for, that it does not need yet?"


def _largest_is_late(program: Program) -> bool:
    """Is more than its own product launched before the largest message?"""
    ops = program.ranks[0]
    sizes = {i: op.collective.bytes for i, op in enumerate(ops) if op.collective}
    first = max(sizes, key=lambda i: sizes[i], default=0)
    return sum(op.flops > 0 for op in ops[:first]) > 1


def cpu_waits_ns(timeline: Timeline, rank: int = 0) -> int:
    """How long the CPU of `rank` waits for its device."""
    own = timeline.of_rank(rank).spans
    return sum(span.duration_ns for span in own if span.kind == "host")


# -- 4.4

MEANS, SAFE, MEMORY, FREE, WINDOW_STEP = LAB.sentences("4.4")


@lru_cache(maxsize=1)
def _means() -> dict[str, Tensor]:
    ranks = [
        [given.backward(layer) for layer in layers]
        for (layers,) in given.window_inputs()
    ]
    return {
        f"layer {i}": (
            torch.stack([g.float() for g in grads]).sum(0) / WORLD
        ).bfloat16()
        for i, grads in enumerate(zip(*ranks, strict=True))
    }


@lru_cache(maxsize=4)
def _window_reference(k: int) -> tuple[int, int]:
    """Its step, and when its last gradient is there."""
    timeline = given.play_window(reference.average_gradients, k).timeline
    return timeline.step_ns, _backward_end_ns(timeline)


@LAB.grader("4.4")
def grade_window(sheet: Sheet, average_gradients: given.Average) -> None:
    """Values and hazards; memory from the record; who waits from the timeline."""
    for k in (2, 1, 3):
        sheet.ran(f"your function: {len(given.TOKENS)} layers, {WORLD} ranks, k = {k}")
        seen = Examined(given.play_window(average_gradients, k))
        best_ns, end_ns = _window_reference(k)
        if k == 2:
            seen.draw_on(sheet, best_ns, "your run, k = 2")
        named = [_named(value, "layer") for value in seen.values]
        wrong = laws.values_law(named, _means())
        judge_results(sheet, seen, wrong, safe=SAFE, values=MEANS, what="a gradient")
        sheet.verify(MEMORY, _too_many(seen.program, k))
        sheet.stop_if_wrong()
        if k == 2:
            sheet.verify(FREE, _late(seen.run.timeline, end_ns))
            sheet.stop_if_wrong()
        slow = laws.step_law(seen.step_ns, best_ns, factor=1.03)
        slow = [replace(v, message=f"k = {k}: {v.message}") for v in slow]
        sheet.verify(WINDOW_STEP, slow)
        sheet.stop_if_wrong()


def _named(tensors: Sequence[Any], what: str) -> dict[str, Tensor]:
    return {f"{what} {i}": t for i, t in enumerate(tensors) if isinstance(t, Tensor)}


def _too_many(program: Program, k: int) -> list[Violation]:
    most = max(given.messages_alive(program, rank) for rank in range(WORLD))
    hint = (
        "what still refers to a message after its mean was written back? The list, and "
        "the names of your loop too"
    )
    if any(given.recorded_elsewhere(life) for life in program.storages):
        hint = (
            "record_stream makes a release safe by putting it off: the allocator makes "
            "new memory meanwhile. Allocate on the stream that uses it"
        )
    message = f"k = {k}: the float32 messages of {most:g} gradients were alive at once"
    return [Violation("memory", message, f"at most {k}", hint)] if most > k else []


def _backward_end_ns(timeline: Timeline) -> int:
    """When the last gradient is there, on the slowest rank."""
    ends = [
        span.end_ns
        for span in timeline.spans
        if span.kind == "compute" and span.attributes.get("label") == given.BACKWARD
    ]
    return max(ends, default=0)


def _late(timeline: Timeline, end_ns: int) -> list[Violation]:
    seen_ns = _backward_end_ns(timeline)
    hint = "which stream is current where you call wait()?"
    if cpu_waits_ns(timeline) > seen_ns // 20:
        hint = "the CPU waits, and launches the next layer late"
    message = f"the last gradient was there at {ms(seen_ns)}"
    expected = f"by {ms(int(1.03 * end_ns))}: messages delay no gradient"
    late = seen_ns > 1.03 * end_ns
    return [Violation("blocked", message, expected, hint)] if late else []


# -- 4.5

SUMS, NO_EARLY_READ, DTYPES, LATENCY, NO_MORE_BYTES = LAB.sentences("4.5")


@LAB.grader("4.5")
def grade_small(sheet: Sheet, sum_all: given.SumAll) -> None:
    """Any way of sending them together."""
    ranks = [tensors for (tensors,) in given.small_inputs()]
    sheet.ran(f"your function on {len(ranks[0])} tensors, 4 ranks")
    seen = Examined(given.play_small(sum_all))
    seen.draw_on(sheet, given.play_small(_flat).timeline.step_ns)
    wrong = []
    for dtype in (torch.int64, torch.float32):
        right = {
            f"tensor {i}": torch.stack(parts).sum(0)
            for i, parts in enumerate(zip(*ranks, strict=True))
            if parts[0].dtype is dtype
        }
        named = [_named(value, "tensor") for value in seen.values]
        wrong += laws.values_law(named, right, what="the value")
    judge_results(sheet, seen, wrong, safe=NO_EARLY_READ, values=SUMS, what="a sum")
    sheet.stop_if_wrong()
    sheet.verify(DTYPES, _mixed(seen.program))
    count = given.latencies(seen.run.timeline)
    sheet.expect(
        LATENCY,
        count <= 2.05,
        seen=f"{count:.0f} latencies of {given.BOARD.link.latency_ns / 1e3:.0f} us",
        expected="2",
    )
    asked = sum(-(-t.numel() * t.itemsize // NUM_RANKS) * NUM_RANKS for t in ranks[0])
    most = wire_bytes("all_reduce", NUM_RANKS, asked)
    sent = max(given.sent_bytes(seen.program, rank) for rank in range(NUM_RANKS))
    sheet.expect(
        NO_MORE_BYTES,
        sent <= most + len(ranks[0]),
        seen=f"{sent} bytes crossed the link of one rank",
        expected=f"at most {most}",
    )


def _mixed(program: Program) -> list[Violation]:
    found = []
    for payload in (op.collective.payload for op in program.ranks[0] if op.collective):
        dtypes = sorted({part.dtype for part in payload})
        message = f"a message of {len(payload)} tensors has {' and '.join(dtypes)}"
        expected = "one dtype: NCCL and gloo refuse another"
        if len(dtypes) > 1:
            found.append(Violation("dtype", message, expected))
    return found


def _flat(tensors: Sequence[Tensor]) -> None:
    """One flat tensor of each dtype: how long the step may be drawn against."""
    for dtype in (torch.float32, torch.int64):
        chosen = [t for t in tensors if t.dtype is dtype]
        flat = torch.cat([t.reshape(-1) for t in chosen])
        dist.all_reduce(flat)
        parts = torch.split(flat, [t.numel() for t in chosen])
        for tensor, part in zip(chosen, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
