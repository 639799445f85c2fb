"""Exercise 0.4: a first program on two ranks, with a message beside a product."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.origins import Held, hold, release
from overlaplab_course.lab00 import sources
from overlaplab_course.lab00.runs import GPU

VALUES = "every rank returns a @ a plus the sum of all x"
ONE_SUM = "every rank sends as many bytes as x has"
WAITED = "the message is waited for, before its result is used"
BESIDE = "the message travels beside the product"

WIDTH = 512
# A copy of x, or one launch more, is no fault; running one after the other is.
SLACK = 1.10

_LUCK = re.compile(r" Here it starts ([\d.]+) us later, by luck\.")
_NO_LUCK = (
    r"\n  In this timing the sum is there \1 us before it is used, but nothing makes "
    r"it so.\n  The check hands you the x that is not summed, so that you see it."
)

Step = Callable[[Tensor, Tensor], Tensor]


def reference(x: Tensor, a: Tensor) -> Tensor:
    """Start the message, compute, wait, use."""
    work = dist.all_reduce(x, async_op=True)
    product = a @ a
    assert work is not None
    work.wait()
    return product + x


def inputs(rank: int) -> tuple[Tensor, Tensor]:
    """What a rank holds: other numbers on each."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(WIDTH, WIDTH, generator=generator)
    a = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return x, a


def run_step(step: Step, world_size: int = 2) -> Run:
    """`step(x, a)` on every rank of the virtual cluster."""
    return release(run(_on_rank, step, world_size=world_size, hardware=GPU))


def _on_rank(step: Step) -> Held:
    with _disable_current_modes():  # given: no work of the step
        x, a = inputs(dist.get_rank())
    answer = hold(step, x, a)
    if not isinstance(answer.value, Tensor):
        raise TypeError(
            f"step returned {type(answer.value).__name__}; expected a tensor"
        )
    return answer


@exercise(
    "0.4",
    title="two ranks: compute while you send",
    solution="step",
    verifies=(WAITED, VALUES, ONE_SUM, BESIDE),
    points=3,
    timeout_s=60.0,
)
def grade_step(sheet: Sheet, step: Step) -> None:
    """Values on two and three ranks; then what ran beside what."""
    sheet.ran("your step on 2 ranks, then on 3")
    for world_size in (2, 3):
        seen = run_step(step, world_size)
        given = run_step(reference, world_size)
        if world_size == 2:
            sheet.show(
                seen.timeline,
                step_ns=seen.timeline.end_ns,
                target_ns=given.timeline.end_ns,
                title="your step on two ranks",
            )
        _check_waited(sheet, seen)
        _check_values(sheet, seen, world_size)
        _check_bytes(sheet, seen)
        sheet.stop_if_wrong()
        _check_beside(sheet, seen, given)


def _check_waited(sheet: Sheet, seen: Run) -> None:
    """The first finding; its others say the same of other ranks."""
    found = laws.no_findings_law(seen.warnings, kinds=("unwaited", "hazard"))
    first = found[0] if found else None
    sheet.expect(
        WAITED,
        first is None,
        seen=_LUCK.sub(_NO_LUCK, sources.readable(first.message)) if first else "",
        expected="wait() stands before the line that uses the sum",
    )


def _check_values(sheet: Sheet, seen: Run, world_size: int) -> None:
    assert seen.program is not None
    held = [inputs(rank) for rank in range(world_size)]
    total = torch.stack([x for x, _ in held]).sum(0)
    wrong = []
    for rank, (_, a) in enumerate(held):
        right = {"the result": a @ a + total}
        answer = {"the result": seen.values[rank]}
        if laws.values_law([answer], right, what="value"):
            wrong.append(str(rank))
    sheet.expect(
        VALUES,
        not wrong,
        seen=f"on {world_size} ranks: the result is wrong on rank {', '.join(wrong)}",
        expected="a @ a + x, with the sum of all ranks' x for x",
        hint=_values_hint(seen.values[0], held, total) if wrong else "",
    )
    sheet.verify(VALUES, laws.origin_law(seen.program))


def _values_hint(
    answer: Tensor, held: Sequence[tuple[Tensor, Tensor]], total: Tensor
) -> str:
    """What rank 0 added to its product in the place of the sum."""
    x, a = held[0]
    if answer.shape != x.shape:
        return f"the shape is {tuple(answer.shape)}, not {tuple(x.shape)}"
    added = answer - a @ a
    for name, other in (("its own x", x), ("the mean", total / len(held))):
        if torch.allclose(added, other.to(added), rtol=1e-4, atol=1e-4):
            return f"rank 0 has {name} in there, not the sum"
    return ""


def _check_bytes(sheet: Sheet, seen: Run) -> None:
    assert seen.program is not None
    wanted = WIDTH * WIDTH * 4
    for rank, ops in enumerate(seen.program.ranks):
        sent = sum(op.collective.bytes for op in ops if op.collective is not None)
        sheet.expect(
            ONE_SUM,
            sent == wanted,
            seen=f"rank {rank} sends {sent} bytes",
            expected=f"{wanted} bytes: x, once",
        )


def _check_beside(sheet: Sheet, seen: Run, given: Run) -> None:
    took_ns, best_ns = seen.timeline.end_ns, given.timeline.end_ns
    report = seen.timeline.report()
    hidden_us, sent_us = report.hidden_ns / 1e3, report.communication_ns / 1e3
    sheet.expect(
        BESIDE,
        took_ns <= SLACK * best_ns,
        seen=f"{hidden_us:.0f} of {sent_us:.0f} us of message have computation beside "
        f"them; the step takes {took_ns / 1e3:.0f} us",
        expected=f"{best_ns / 1e3:.0f} us",
        hint=_hint(seen),
    )


def _hint(seen: Run) -> str:
    """Which order makes the step serial."""
    assert seen.program is not None
    ops = seen.program.ranks[0]
    first = next((op.index for op in ops if op.collective is not None), None)
    product = next((op.index for op in ops if "mm" in op.name), None)
    if first is None or product is None:
        return ""
    if product < first and product in ops[first].after:
        return (
            "a message starts after everything that its stream holds at the launch: "
            "which line should come first?"
        )
    if first in ops[product].after:
        return "what you launch after wait(), or after a blocking call, waits too"
    return ""
