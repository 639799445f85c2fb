"""Graders of lab 04's core, 4.1 to 4.4, and of 4.5. `checks_extra` has the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.cluster.run import Run
from overlaplab.grading import laws, program_laws
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import Examined, judge_step
from overlaplab.grading.laws import Violation
from overlaplab.grading.violation import ms
from overlaplab.program import Program, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab04 import given, reference
from overlaplab_course.lab04.checks_extra import LAB, SLOWER, most_sent, wrong_results
from overlaplab_course.lab04.given import NUM_RANKS, WORLD, Inputs, play, wire_bytes

# -- 4.1

IN_PLACE, PARTS, BYTES, SAFE_SUM, SIZES = LAB.sentences("4.1")


def _sum_step(tensor: Tensor, sum_in_place: Callable[[Tensor], Any]) -> Tensor:
    """What is graded: the tensor, read right after `sum_in_place(tensor)`."""
    sum_in_place(tensor)
    return tensor.clone()


@LAB.grader("4.1")
def grade_in_two(sheet: Sheet, all_reduce_in_two: Callable[[Tensor], Any]) -> None:
    """Values on every rank; bytes from the record; then sizes that do not divide."""
    shapes = LAB.cases("4.1", "shapes")
    for sentence, shape, n in [(s, *case) for s in shapes for case in shapes[s]]:
        size = " x ".join(map(str, shape))
        sheet.ran(f"your function on {size} elements, {n} ranks")
        inputs = [torch.randn(*shape, generator=draw) for draw in given.draws(7, n)]
        seen = Examined(play(_sum_step, [(t,) for t in inputs], all_reduce_in_two))
        total = {"the tensor": torch.stack(inputs).sum(0)}
        as_before = n > 1 and any(map(torch.equal, inputs, seen.values))
        if sentence == IN_PLACE:
            title = f"your run on {size} elements"
            sheet.show(seen.timeline, step_ns=seen.step_ns, title=title)
            first, first_total = ([(t,) for t in inputs], all_reduce_in_two), total
        hint = LAB.hint(IN_PLACE, "unchanged" if as_before else "")
        program_laws.hold(
            sheet,
            seen.run,
            wrong=_wrong_sums(seen.run, total),
            once=(),  # the bytes, below
            what="the tensor",
            values=sentence,
            hints={"recorded": hint},
        )
        if sentence != IN_PLACE:
            sheet.stop_if_wrong()
        ops = [op.collective for op in seen.program.ranks[0] if op.collective]
        used = ", ".join(op.operation for op in ops)
        LAB.refuse(sheet, PARTS, "all_reduce" in used.split(", "), used=used)
        padded = -(-inputs[0].numel() // n) * n * inputs[0].itemsize
        wanted = wire_bytes("all_reduce", n, padded)
        facts = {"wanted": wanted, "n": n, "last": n - 1, "used": used or "nothing"}
        wrong = []
        for rank in range(n):
            sent = given.sent_bytes(seen.program, rank)
            if abs(sent - wanted) > n:  # each count is rounded up
                facts |= {"rank": rank, "sent": sent}
                why = "many" if sent > wanted else "few"
                wrong.append(LAB.violation(sheet, BYTES, why=why, **facts))
        sheet.verify(BYTES, wrong)
        sheet.stop_if_wrong()
    apart = program_laws.order_law(
        "your function",
        lambda: play(_sum_step, *first, apart=True),
        lambda ran: _wrong_sums(ran, first_total),
    )
    sheet.verify(IN_PLACE, apart)


def _wrong_sums(ran: Run, total: Mapping[str, Tensor]) -> list[Violation]:
    values = [{"the tensor": value} for value in ran.values]
    return laws.values_law(values, total, what="the value")


# -- 4.2 and 4.3

VALUES, NO_RACE, WAITED, STEP = LAB.sentences("4.2")  # and of 4.3

Step = Callable[[Tensor, dict[str, Tensor]], Tensor]


# Ranks and rows of input: as in the lesson, and another shape in another world.
STEPS_ON = ((NUM_RANKS, 200), (3, 260))


@lru_cache(maxsize=8)
def best_run(step: Step, inputs: Callable[..., Inputs], on: tuple[int, int]) -> Run:
    """The course's own step."""
    return play(step, inputs(*on))


@LAB.grader("4.2")
def grade_waits(sheet: Sheet, two_sums: Step) -> None:
    """Right, safe, and as short as the dependencies allow."""

    def right(inputs: Inputs) -> list[Tensor]:
        a, b = (sum(x @ w[name] for x, w in inputs) for name in "ab")
        return [a @ w["d"] + b @ w["e"] + x @ w["c"] for x, w in inputs]

    _grade(sheet, two_sums, reference.two_sums, given.two_sums_inputs, right)


@LAB.grader("4.3")
def grade_order(sheet: Sheet, experts: Step) -> None:
    """Any order and any stream will do, if the step is short."""

    def right(inputs: Inputs) -> list[Tensor]:
        routed, gate = (sum(x @ w[n] for x, w in inputs) for n in ("routed_in", "gate"))
        return [
            (routed @ w["routed_out"] + (x @ w["shared_in"]).relu() @ w["shared_out"])
            * gate
            for x, w in inputs
        ]

    make = given.experts_inputs
    _grade(sheet, experts, reference.experts, make, right, largest_first=True)


def _grade(
    sheet: Sheet,
    step: Step,
    ours: Step,
    make_inputs: Callable[..., Inputs],
    right: Callable[[Inputs], list[Tensor]],
    *,
    largest_first: bool = False,
) -> None:
    """Judge a step.

    Args:
        ours: the course's own.
        right: the results, computed by one process.
        largest_first: only an order with the largest message first is short.
    """
    for number, on in enumerate(STEPS_ON):
        inputs, best = make_inputs(*on), best_run(ours, make_inputs, on)
        what = f"your step on {on[0]} ranks, {len(inputs[0][1])} matrices a rank"
        sheet.ran(what + (f", {on[1]} rows" if number else ""))
        seen, wanted = Examined(play(step, inputs)), right(inputs)
        best_ns = best.timeline.step_ns
        if number == 0:
            seen.draw_on(sheet, best_ns)
        wrong, hints = (
            wrong_results(seen.values, wanted),
            {"cpu": LAB.hint(STEP, "cpu")},
        )
        program_laws.hold(sheet, seen.run, wrong=wrong, hints=hints)
        sheet.stop_if_wrong()
        late = largest_first and _largest_is_late(seen.program)
        why = "late" if late else "early"
        if cpu_waits_ns(seen.run.timeline) > seen.step_ns // 10:
            why = "cpu"
        elif seen.run.timeline.report().hidden_ns == 0:
            why = "nothing"
        judge_step(sheet, STEP, seen, best_ns, hint=LAB.hint(STEP, why))
        on_second = program_laws.slow_law(SLOWER, seen.program, Examined(best).program)
        sheet.verify(STEP, on_second)
        sheet.stop_if_wrong()
    apart = program_laws.order_law(
        "your step",
        lambda: play(step, inputs, apart=True),
        lambda ran: wrong_results(ran.values, wanted),
    )
    sheet.verify(VALUES, apart)


def _largest_is_late(program: Program) -> bool:
    """Is more than its own product launched before the largest message?"""
    ops = program.ranks[0]
    sizes = {i: op.collective.bytes for i, op in enumerate(ops) if op.collective}
    first = max(sizes, key=lambda i: sizes[i], default=0)
    return sum(op.flops > 0 for op in ops[:first]) > 1


def cpu_waits_ns(timeline: Timeline) -> int:
    """How long the CPU of rank 0 waits for its device."""
    own = timeline.of_rank(0).spans
    return sum(span.duration_ns for span in own if span.kind == "host")


# -- 4.4

MEANS, SAFE, MEMORY, FREE, WINDOW_STEP = LAB.sentences("4.4")


# Ranks and tokens of each layer: as in the lesson, and another shape and world.
WINDOWS = ((WORLD, given.TOKENS), (3, (50, 300, 1200, 50, 50, 900)))
WINDOW_CLOCK = program_laws.slower(given.FAST_CPU, launch_ns=2_000)


@lru_cache(maxsize=2)
def _means(on: tuple[int, tuple[int, ...]]) -> dict[str, Tensor]:
    ranks = [map(given.backward, layers) for (layers,) in given.window_inputs(*on)]
    sums = (torch.stack(grads).float().sum(0) for grads in zip(*ranks, strict=True))
    return {f"layer {i}": (total / on[0]).bfloat16() for i, total in enumerate(sums)}


@lru_cache(maxsize=4)
def _window_reference(k: int, on: tuple[int, tuple[int, ...]]) -> Run:
    return given.play_window(reference.average_gradients, k, given.window_inputs(*on))


@LAB.grader("4.4")
def grade_window(sheet: Sheet, average_gradients: given.Average) -> None:
    """Values and hazards; memory from the record; who waits from the timeline."""
    for k, on in ((2, WINDOWS[0]), (1, WINDOWS[0]), (3, WINDOWS[0]), (2, WINDOWS[1])):
        num_ranks, tokens = on
        sheet.ran(f"your function: {len(tokens)} layers, {num_ranks} ranks, k = {k}")
        inputs = given.window_inputs(*on)
        seen = Examined(given.play_window(average_gradients, k, inputs))
        best = _window_reference(k, on)
        timeline, right = seen.run.timeline, best.timeline
        if (k, on) == (2, WINDOWS[0]):
            seen.draw_on(sheet, right.step_ns, "your run, k = 2")
        wrong = laws.values_law(_named(seen.run, "layer"), _means(on))
        program_laws.hold(sheet, seen.run, wrong=wrong, what="a gradient")
        ranks = range(num_ranks)
        most = max(given.messages_alive(seen.program, rank) for rank in ranks)
        lent = any(map(given.recorded_elsewhere, seen.program.storages))
        why = "recorded" if lent else "kept"
        LAB.refuse(sheet, MEMORY, most > k, why=why, k=k, most=most)
        sheet.stop_if_wrong()
        if k == 2:
            end_ns, by_ns = map(_backward_end_ns, (timeline, right))
            why = "cpu" if cpu_waits_ns(timeline) > end_ns // 20 else "stream"
            facts = {"was": ms(end_ns), "by": ms(int(1.03 * by_ns))}
            LAB.refuse(sheet, FREE, end_ns > 1.03 * by_ns, why=why, **facts)
            sheet.stop_if_wrong()
        slow = laws.step_law(seen.step_ns, right.step_ns, factor=1.03)
        slow = [replace(v, message=f"k = {k}: {v.message}") for v in slow]
        sheet.verify(WINDOW_STEP, slow)
        late = program_laws.slow_law(WINDOW_CLOCK, seen.program, Examined(best).program)
        sheet.verify(WINDOW_STEP, late)
        sheet.stop_if_wrong()
    apart = program_laws.order_law(
        "your function",
        lambda: given.play_window(average_gradients, k, inputs, apart=True),
        lambda ran: laws.values_law(_named(ran, "layer"), _means(on)),
    )
    sheet.verify(MEANS, apart)


def _named(seen: Run, what: str) -> list[dict[str, Tensor | None]]:
    return [
        {f"{what} {i}": t for i, t in enumerate(value) if isinstance(t, Tensor)}
        for value in seen.values
    ]


def _backward_end_ns(timeline: Timeline) -> int:
    """When the last gradient is there, on the slowest rank."""
    computed = (span for span in timeline.spans if span.kind == "compute")
    own = (s for s in computed if s.attributes.get("label") == given.BACKWARD)
    return max((span.end_ns for span in own), default=0)


# -- 4.5

SUMS, NO_EARLY_READ, DTYPES, LATENCY, NO_MORE_BYTES, FREE_CPU = LAB.sentences("4.5")
# Ranks and how many float32: as in the lesson, and another list in another world.
SMALL_CLOCK = program_laws.slower(given.CAPTURED, launch_ns=5_000)
SMALL = ((NUM_RANKS, given.FLOATS), (3, given.FEWER_FLOATS))


@LAB.grader("4.5")
def grade_small(sheet: Sheet, sum_all: given.SumAll) -> None:
    """Any way of sending them together."""
    for on in SMALL:
        inputs, n = given.small_inputs(*on), on[0]
        ranks = [tensors for (tensors,) in inputs]
        sheet.ran(f"your function on {len(ranks[0])} tensors, {n} ranks")
        seen = Examined(given.play_small(sum_all, inputs))
        if on == SMALL[0]:
            seen.draw_on(sheet, given.play_small(_flat).timeline.step_ns)
        wrong = _wrong_totals(seen.run, inputs)
        program_laws.hold(sheet, seen.run, wrong=wrong, once=(), what="a sum")
        sheet.stop_if_wrong()
        sheet.verify(DTYPES, _mixed(sheet, seen.program))
        for clock in (given.CAPTURED, SMALL_CLOCK):
            latency_ns = clock.link.latency_ns
            count = given.latencies(resolve(seen.program, clock), latency_ns)
            facts: dict[str, Any] = {"count": count, "each_us": latency_ns / 1e3}
            LAB.expect(sheet, LATENCY, count <= 2.05, **facts)
        asked = sum(-(-t.numel() * t.itemsize // n) * n for t in ranks[0])
        most, sent = wire_bytes("all_reduce", n, asked), most_sent(seen)
        few = sent <= most + len(ranks[0])
        LAB.expect(sheet, NO_MORE_BYTES, few, sent=sent, most=most)
        sheet.stop_if_wrong()
    apart = program_laws.order_law(
        "your function",
        lambda: given.play_small(sum_all, inputs, apart=True),
        lambda ran: _wrong_totals(ran, inputs),
    )
    sheet.verify(DTYPES, apart)


def _wrong_totals(ran: Run, inputs: Inputs) -> list[Violation]:
    ranks = [tensors for (tensors,) in inputs]
    sums = [torch.stack(parts).sum(0) for parts in zip(*ranks, strict=True)]
    wrong = []
    for dtype in (torch.int64, torch.float32):
        right = {f"tensor {i}": t for i, t in enumerate(sums) if t.dtype is dtype}
        wrong += laws.values_law(_named(ran, "tensor"), right, what="the value")
    return wrong


def _mixed(sheet: Sheet, program: Program) -> list[Violation]:
    sent = (op.collective.payload for op in program.ranks[0] if op.collective)
    found = [
        (len(payload), sorted({part.dtype for part in payload})) for payload in sent
    ]
    return [
        LAB.violation(sheet, DTYPES, number=number, dtypes=" and ".join(dtypes))
        for number, dtypes in found
        if len(dtypes) > 1
    ]


def _flat(tensors: Sequence[Tensor]) -> None:
    """One flat tensor of each dtype: how long the step may be drawn against."""
    for dtype in (torch.float32, torch.int64):
        chosen = [t for t in tensors if t.dtype is dtype]
        flat = torch.cat([t.reshape(-1) for t in chosen])
        dist.all_reduce(flat)
        parts = torch.split(flat, [t.numel() for t in chosen])
        for tensor, part in zip(chosen, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
