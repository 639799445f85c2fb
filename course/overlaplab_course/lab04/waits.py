"""Exercises 4.2 and 4.3: where to wait, and what to launch before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import Violation
from overlaplab.program import Finding, Program
from overlaplab.timeline import Timeline
from overlaplab_course.lab04 import reference
from overlaplab_course.lab04.board import Inputs, cpu_waits_ns, matrices, play

VALUES = "the result is right on every rank"
SAFE = "nothing reads a tensor while it is being summed"
WAITED = "every message is waited for"
STEP = "the step is as short as the dependencies allow, within 2 %"

ROWS = 200
# One layer, cut over the ranks: `part` is summed, the side branch needs no sum.
LAYER: Mapping[str, tuple[int, int]] = {
    "in": (250, 500),
    "out": (500, 400),
    "side_in": (250, 400),
    "side_out": (400, 400),
}
TWO_SUMS: Mapping[str, tuple[int, int]] = {
    "a": (250, 250),
    "b": (250, 500),
    "c": (250, 400),
    "d": (250, 400),
    "e": (500, 400),
}
EXPERTS: Mapping[str, tuple[int, int]] = {
    "routed_in": (400, 1000),
    "routed_out": (1000, 400),
    "gate": (400, 400),
    "shared_in": (400, 250),
    "shared_out": (250, 400),
}

Step = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


def layer_inputs() -> Inputs:
    """(x, w) of each rank, for the first program of the lab."""
    return matrices(ROWS, LAYER)


def two_sums_inputs() -> Inputs:
    """(x, w) of each rank, for exercise 4.2."""
    return matrices(ROWS, TWO_SUMS)


def experts_inputs() -> Inputs:
    """(x, w) of each rank, for exercise 4.3."""
    return matrices(ROWS, EXPERTS)


@dataclass(frozen=True)
class Task:
    """A step to be arranged.

    Args:
        name: for the verdict.
        inputs: of all ranks.
        reference: as good as it gets.
        oracle: inputs -> the right result of each rank, computed by one process.
        dear_first: only an order with the largest message first is short.
    """

    name: str
    inputs: Callable[[], Inputs]
    reference: Step
    oracle: Callable[[Inputs], list[torch.Tensor]]
    dear_first: bool = False

    def reference_ns(self) -> int:
        return _reference_ns(self)


@lru_cache(maxsize=4)
def _reference_ns(task: Task) -> int:
    return play(task.reference, task.inputs()).timeline.step_ns


def _two_sums_oracle(inputs: Inputs) -> list[torch.Tensor]:
    a = sum(x @ w["a"] for x, w in inputs)
    b = sum(x @ w["b"] for x, w in inputs)
    return [a @ w["d"] + b @ w["e"] + x @ w["c"] for x, w in inputs]


def _experts_oracle(inputs: Inputs) -> list[torch.Tensor]:
    routed = sum(x @ w["routed_in"] for x, w in inputs)
    gate = sum(x @ w["gate"] for x, w in inputs)
    return [
        (routed @ w["routed_out"] + (x @ w["shared_in"]).relu() @ w["shared_out"])
        * gate
        for x, w in inputs
    ]


TWO_SUMS_TASK = Task("two sums", two_sums_inputs, reference.two_sums, _two_sums_oracle)
EXPERTS_TASK = Task(
    "experts", experts_inputs, reference.experts, _experts_oracle, dear_first=True
)


@exercise(
    "4.2",
    title="place the waits",
    solution="two_sums",
    verifies=(VALUES, SAFE, WAITED, STEP),
    points=2,
    timeout_s=90.0,
)
def grade_waits(sheet: Sheet, two_sums: Step) -> None:
    """Right, safe, and as short as the dependencies allow."""
    _grade(sheet, TWO_SUMS_TASK, two_sums)


@exercise(
    "4.3",
    title="launch in a better order",
    solution="experts",
    verifies=(VALUES, SAFE, WAITED, STEP),
    points=3,
    timeout_s=90.0,
)
def grade_order(sheet: Sheet, experts: Step) -> None:
    """Any order and any stream will do, if the step is short."""
    _grade(sheet, EXPERTS_TASK, experts)


def _grade(sheet: Sheet, task: Task, step: Step) -> None:
    inputs = task.inputs()
    sheet.ran(f"your step on 4 ranks, {len(inputs[0][1])} matrices a rank")
    seen = play(step, inputs)
    step_ns, reference_ns = seen.timeline.step_ns, task.reference_ns()
    sheet.show(seen.timeline.of_rank(0), step_ns=step_ns, target_ns=reference_ns)
    sheet.verify(WAITED, laws.no_findings_law(seen.warnings, kinds=("unwaited",)))
    sheet.verify(SAFE, _hazards(seen.warnings))
    sheet.verify(VALUES, wrong_results(seen.values, task.oracle(inputs)))
    assert seen.program is not None
    sheet.verify(VALUES, laws.origin_law(seen.program))
    sheet.stop_if_wrong()
    late = task.dear_first and _dear_message_is_late(seen.program)
    wrong = laws.step_law(step_ns, reference_ns)
    sheet.verify(STEP, [_with_hint(v, seen.timeline, late) for v in wrong])


def _hazards(findings: Sequence[Finding]) -> list[Violation]:
    return laws.no_findings_law(findings, kinds=("hazard", "unmatched"))


def wrong_results(
    seen: Sequence[Any], right: Sequence[torch.Tensor], what: str = "the result"
) -> list[Violation]:
    """Each rank's result beside its own oracle's."""
    found = []
    for rank, (value, wanted) in enumerate(zip(seen, right, strict=True)):
        if not isinstance(value, torch.Tensor):
            found.append(
                Violation(
                    "values",
                    f"on rank {rank} the step returned {type(value).__name__}",
                    "the tensor that it computes",
                    "is there a return?",
                    rank=rank,
                )
            )
            continue
        wrong = laws.values_law([{what: value}], {what: wanted}, what="the value")
        found += [
            Violation(v.law, v.message.replace("rank 0", f"rank {rank}"), v.expected)
            for v in wrong
        ]
    return found


def _dear_message_is_late(program: Program) -> bool:
    """Is more than its own product launched before the largest message?"""
    ops = program.ranks[0]
    sizes = {i: op.collective.bytes for i, op in enumerate(ops) if op.collective}
    first = max(sizes, key=lambda i: sizes[i], default=0)
    return sum(op.flops > 0 for op in ops[:first]) > 1


def _with_hint(violation: Violation, timeline: Timeline, late: bool) -> Violation:
    """What the lanes show: where does the compute stream stand still?"""
    report = timeline.report()
    if cpu_waits_ns(timeline) > report.step_ns // 10:
        hint = "the CPU itself waits: which call blocks it, and must it?"
    elif report.hidden_ns == 0:
        hint = "nothing is hidden: what could be computed while the message travels?"
    elif late:
        hint = "launch the message with most behind it earlier"
    else:
        hint = "what does the compute stream wait for, that it does not need yet?"
    return Violation(violation.law, violation.message, violation.expected, hint)
