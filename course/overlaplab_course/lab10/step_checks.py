"""Graders of the steps of lab 10: 10.2, 10.3 and 10.5.

Each runs the learner's part of a step with the course's own around it, on stacks of
equal and of uneven layers, and times what was recorded on a fast and on a slow link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from overlaplab.grading import laws, program_laws
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.violation import Violation
from overlaplab.hardware import Hardware
from overlaplab.program import Program, resolve
from overlaplab.view import format_bytes
from overlaplab_course.lab10 import given, reference
from overlaplab_course.lab10.given import (
    BOARD,
    Backward,
    Played,
    Stack,
    Weights,
)
from overlaplab_course.lab10.late import starts_late, waits_for_later
from overlaplab_course.lab10.ring import (
    count_ahead,
    find_gathers,
    find_overwritten,
    wire_bytes,
    with_ring,
)
from overlaplab_course.lab10.show import play
from overlaplab_course.peaks import most_bytes

LAB = Declared(__file__)
VALUES, SAFE, ONCE, ONE_SLOT, CPU = LAB.sentences("10.2")
SLOTS, PROMPT = LAB.sentences("10.3")[3:5]
MEANS, SENT_SAFE, SENT_ONCE, BUFFERS, GOES_ON, _ = LAB.sentences("10.5")
ALIKE = "every rank launches the same messages in the same order"
CLOCKS = {
    "the fast link": BOARD,
    "the slow link": program_laws.slower(BOARD, launch_ns=100_000, wire=6),
}


@dataclass(frozen=True)
class Case:
    """A stack, a number of ranks, and what the weights are asked for."""

    name: str
    stack: Stack
    num_ranks: int
    depth: int = 1

    def play(
        self,
        weights: Weights,
        args: tuple[Any, ...],
        backward: Backward | None = reference.backward,
    ) -> Played:
        """Forward and backward on the board; without `backward`, the forward."""
        on: dict[str, Any] = {"stack": self.stack, "num_ranks": self.num_ranks}
        return play(weights, *args, backward=backward, **on)

    @property
    def thin(self) -> Case:
        """Two rows of input: activations are next to nothing beside the weights."""
        return replace(self, stack=replace(self.stack, rows=2))

    def __str__(self) -> str:
        return f"{self.name}, {self.num_ranks} ranks, depth {self.depth}"


_THIN = Stack(num_layers=5, width=31, rows=40, dtype=torch.float64)
_TABLES = Stack(num_layers=7, tables=(0, 0, 0, 400, 0, 0, 300))
ON_DEMAND = (
    Case("6 equal layers", given.SMALL, 2, 0),
    Case("5 layers of width 31 in float64", _THIN, 3, 0),
)
PREFETCH = (
    Case("6 equal layers", given.SMALL, 2, 1),
    Case("7 layers, two of them with a table", _TABLES, 3, 2),
    Case("5 layers of width 31 in float64", _THIN, 4, 3),
    Case("3 equal layers", Stack(num_layers=3), 3, 0),
    Case("2 layers", Stack(num_layers=2), 2, 5),
)
# At depth 1 whoever waits for a gather waits for the gradients before it, too: a wait
# for those that is missing cannot be seen. Deeper, the gather was launched before them.
BACKWARD = (
    Case("6 equal layers", given.SMALL, 2),
    Case("7 layers, two of them with a table", _TABLES, 3, 3),
    Case("1 layer of width 31 in float64", replace(_THIN, num_layers=1), 3),
)


@lru_cache(maxsize=32)
def best(case: Case) -> Played:
    """The course's own step."""
    return case.play(reference.prefetched, (case.depth,))


@lru_cache(maxsize=64)
def _best_ns(case: Case, clock: str) -> int:
    return resolve(best(case).program, CLOCKS[clock]).step_ns


@LAB.grader("10.2")
def grade_on_demand(sheet: Sheet, on_demand: Weights) -> None:
    """One slot, each layer in its time; how long it takes is not asked."""
    for number, case in enumerate(ON_DEMAND):
        sheet.ran(f"forward and backward of {case.name} on {case.num_ranks} ranks")
        with sheet.meeting(ONCE, hint=ALIKE):
            seen = case.play(on_demand, ())
        if number == 0:
            _draw(sheet, seen, best(case).step_ns, "your gathers on demand")
        _judge_weights(sheet, seen, case, on_demand, (), ONE_SLOT)
        sheet.stop_if_wrong()


@LAB.grader("10.3")
def grade_prefetched(sheet: Sheet, prefetched: Weights) -> None:
    """The ring, and when each gather starts, on two clocks."""
    for number, case in enumerate(PREFETCH):
        judge_prefetcher(sheet, case, prefetched, "your prefetcher", draw=number == 0)
        sheet.stop_if_wrong()


def judge_prefetcher(
    sheet: Sheet, case: Case, prefetched: Weights, whose: str, *, draw: bool = True
) -> None:
    """All that 10.3 promises, on one case; a run that is wrong is drawn."""
    sheet.ran(f"{whose}: forward and backward of {case}")
    with sheet.meeting(ONCE, hint=ALIKE):
        seen = case.play(prefetched, (case.depth,))
    good = _judge_weights(sheet, seen, case, prefetched, (case.depth,), SLOTS)
    for clock, hardware in CLOCKS.items() if good else ():
        late = late_gathers(seen.program, case, clock, hardware)
        good &= sheet.verify(PROMPT, late)
    if draw or not good:
        _draw(sheet, seen, best(case).step_ns, f"{whose}: {case}")


def _draw(sheet: Sheet, seen: Played, best_ns: int, title: str) -> None:
    timeline = with_ring(seen.program, seen.run.timeline)
    sheet.show(timeline, step_ns=seen.step_ns, target_ns=best_ns, title=title)


def _judge_weights(
    sheet: Sheet,
    seen: Played,
    case: Case,
    weights: Weights,
    args: tuple[Any, ...],
    memory: str,
) -> bool:
    """The laws of whoever brings weights; whether all hold."""
    good = sheet.verify(memory, too_much(case, weights, args, case.depth + 1))
    return good & program_laws.hold(
        sheet,
        seen.run,
        wrong=wrong_values(seen, case),
        once=wrong_gathers(seen.program, case),
        told=partial(unsafe_slots, seen),
    )


def unsafe_slots(seen: Played, found: Sequence[Violation]) -> Sequence[Violation]:
    """The findings of the run; where a slot is filled too soon, that alone.

    The stream would be told to wait for the weights of a layer that comes later.
    """
    if not found:
        return found
    too_soon = [
        Violation(
            "overwritten",
            f"G{gather.layer} fills the slot that {use.short} still reads: rank {rank} "
            f"launches G{gather.layer} before {use.short}",
            f"G{gather.layer} is launched after {use.short}",
            "is a slot free when you launch into it? Count slots and launches",
        )
        for rank in range(len(seen.program.ranks))
        for gather, use in find_overwritten(seen.program, rank)
    ]
    return too_soon or found


def wrong_values(
    seen: Played, case: Case, *, grads_only: bool = False
) -> list[Violation]:
    """Outputs and shards of mean gradients against one process."""
    outputs, grads = _right(case.stack, case.num_ranks)
    found = []
    for rank, (y, mine) in enumerate(seen.values):
        parts = [given.split(whole, case.num_ranks)[rank] for whole in grads]
        right = _named(outputs[rank], parts, grads_only)
        named = [_named(y, mine, grads_only)]
        found += laws.values_law(named, right, what="the value", rank=rank)
    return found


def _named(y: Tensor, grads: Sequence[Tensor], grads_only: bool) -> dict[str, Tensor]:
    names = {f"the gradient shard of layer {i}": grad for i, grad in enumerate(grads)}
    return names if grads_only else {"the output": y, **names}


@lru_cache(maxsize=16)
def _right(stack: Stack, num_ranks: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    return stack.right(num_ranks)


def wrong_gathers(program: Program, case: Case) -> list[Violation]:
    """Each rank gathers what it uses, and as many bytes as that takes."""
    found = []
    for rank in range(len(program.ranks)):
        right = find_gathers(best(case).program, rank)
        seen = find_gathers(program, rank)
        sent, wanted = (sum(g.bytes for g in gathers) for gathers in (seen, right))
        missing = {g.layer for g in right} - {g.layer for g in seen}
        expected = f"{len(right)} gathers, {format_bytes(wanted)}: a layer for each use"
        if missing:
            layer = min(m for m in missing if m is not None)
            message = f"rank {rank} never gathers layer {layer}"
            hint = "does the gather send unit.shard?"
            found.append(Violation("gathers", message, expected, hint))
        elif sent > wanted:
            message = f"{len(seen)} gathers of rank {rank} bring {format_bytes(sent)}"
            hint = "unit.numel counts the whole layer; each rank sends unit.shard"
            if len(seen) > len(right):
                hint = "is a layer gathered again that is there?"
            found.append(Violation("gathers", message, expected, hint))
    return found


def too_much(
    case: Case,
    weights: Weights,
    args: tuple[Any, ...],
    most: int,
    backward: Backward | None = None,
) -> list[Violation]:
    """More than the reference holds, by an eighth of a layer: counted in layers.

    Looked at where little else lives: with a thin input, and in the forward, before
    any gradient is there, too.
    """
    found = []
    layer = case.stack.slot_bytes(case.num_ranks)
    what = "gathered" if backward is None else "gradients"
    ours = best(case.thin).program
    theirs = case.thin.play(weights, args, backward or reference.backward).program
    for in_forward in (False,) if backward else (True, False):
        held = most_bytes(theirs, in_forward=in_forward)
        least = most_bytes(ours, in_forward=in_forward)
        if held > least + layer // 8:
            more = (held - least) / layer
            message = (
                f"{most + more:.1f} layers are {what} at once: a rank holds "
                f"{format_bytes(held)}, where {format_bytes(least)} are enough"
            )
            found.append(Violation("memory", message, f"{most} at most"))
    return found


def late_gathers(
    program: Program, case: Case, clock: str, hardware: Hardware
) -> list[Violation]:
    """As fast as the reference, or else: which gathers start late.

    start(k) <= max(end of use k - depth - 1, end of the message before it)
    """
    timeline = resolve(program, hardware)
    slow = laws.step_law(timeline.step_ns, _best_ns(case, clock))
    if not slow:
        return []
    late = [
        *waits_for_later(program, timeline),
        *starts_late(program, timeline, case.depth),
    ]
    first, *others = late or slow
    ahead, hint = count_ahead(program, 0), first.hint
    if not hint and 0 < ahead < case.depth:
        hint = f"only {ahead} ahead where the depth is {case.depth}: is `depth` used?"
    message = f"{case}, {clock}: {first.message}"
    return [replace(first, message=message, hint=hint), *others]


# -- 10.5


@LAB.grader("10.5")
def grade_backward(sheet: Sheet, backward: Backward) -> None:
    """The learner's backward with the course's prefetcher, near and far ahead."""
    for number, case in enumerate(BACKWARD):
        sheet.ran(f"our forward and prefetcher, your backward: {case}")
        with sheet.meeting(SENT_ONCE, hint=ALIKE):
            seen = case.play(reference.prefetched, (case.depth,), backward)
        if number == 0:
            _draw(sheet, seen, best(case).step_ns, "your backward pass")
        if not _judge_backward(sheet, seen, case, backward):
            title = f"your backward pass: {case}"
            _draw(sheet, seen, best(case).step_ns, title)
        sheet.stop_if_wrong()


def _judge_backward(sheet: Sheet, seen: Played, case: Case, backward: Backward) -> bool:
    more = too_much(case, reference.prefetched, (case.depth,), 2, backward)
    good = sheet.verify(BUFFERS, more)
    wrong = wrong_values(seen, case, grads_only=True)
    good &= program_laws.hold(
        sheet,
        seen.run,
        wrong=wrong,
        once=_wrong_sends(sheet, seen.program, case),
        what="a gradient",
        hints={"recorded": _mean_hint(seen, case) if wrong else ""},
    )
    for clock, hardware in CLOCKS.items() if good else ():
        took_ns = resolve(seen.program, hardware).step_ns
        slow = laws.step_law(took_ns, _best_ns(case, clock))
        where = f"{case}, {clock}: "
        slow = [replace(v, message=where + v.message) for v in slow]
        good &= sheet.verify(GOES_ON, slow)
    return good


def _wrong_sends(sheet: Sheet, program: Program, case: Case) -> list[Violation]:
    found = []
    for rank in range(len(program.ranks)):
        sent = _scattered(program, rank)
        wanted = sum(_scattered(best(case).program, rank))
        facts: dict[str, Any] = {"rank": rank, "count": len(sent), "sent": sum(sent)}
        if sum(sent) != wanted:
            found.append(LAB.violation(sheet, SENT_ONCE, wanted=wanted, **facts))
    return found


def _scattered(program: Program, rank: int) -> list[int]:
    """What crosses the link of a rank in every message that is no gather."""
    return [
        wire_bytes(op)
        for op in program.ranks[rank]
        if op.collective is not None and op.collective.operation != "all_gather"
    ]


def _mean_hint(seen: Played, case: Case) -> str:
    """What wrong gradients look like, "" if like nothing known."""
    divided = Played(
        replace(
            seen.run,
            values=tuple(
                (y, [grad / case.num_ranks for grad in grads])
                for y, grads in seen.values
            ),
        )
    )
    if case.num_ranks > 1 and not wrong_values(divided, case, grads_only=True):
        return "this is the SUM over the ranks: divide by dist.get_world_size()"
    return ""
