"""Exercise 0.4: a first program on two ranks, with a message beside a product."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.lab00.runs import GPU

VALUES = "every rank returns a @ a plus the sum of all x"
ONE_SUM = "every rank sends as many bytes as x has"
WAITED = "the message is waited for, before its result is used"
BESIDE = "the message travels beside the product"

WIDTH = 512
# A copy of x, or one launch more, is no fault; running one after the other is.
SLACK = 1.10

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
    return run(_on_rank, step, world_size=world_size, hardware=GPU)


def _on_rank(step: Step) -> Tensor:
    with _disable_current_modes():  # given: no work of the step
        x, a = inputs(dist.get_rank())
    answer = step(x, a)
    if not isinstance(answer, Tensor):
        raise TypeError(f"step returned {type(answer).__name__}; expected a tensor")
    return answer


@exercise(
    "0.4",
    title="two ranks: compute while you send",
    solution="step",
    verifies=(VALUES, WAITED, ONE_SUM, BESIDE),
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
        sheet.verify(
            WAITED, laws.no_findings_law(seen.warnings, kinds=("unwaited", "hazard"))
        )
        _check_values(sheet, seen, world_size)
        _check_bytes(sheet, seen)
        sheet.stop_if_wrong()
        _check_beside(sheet, seen, given)


def _check_values(sheet: Sheet, seen: Run, world_size: int) -> None:
    held = [inputs(rank) for rank in range(world_size)]
    total = sum(x for x, _ in held)
    violations = []
    for rank, (_, a) in enumerate(held):
        right = {"the result": a @ a + total}
        violations += laws.values_law(
            [{"the result": seen.values[rank]}], right, what="value"
        )
    hint = ""
    if violations:
        x, a = held[0]
        if torch.allclose(seen.values[0], a @ a + x, rtol=1e-4, atol=1e-4):
            hint = "rank 0 has its own x in there, not the sum"
    sheet.expect(
        VALUES,
        not violations,
        seen=f"on {world_size} ranks: {violations[0].message}" if violations else "",
        expected=violations[0].expected.partition(",")[0] if violations else "",
        hint=hint,
    )


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
