"""Exercise 4.5: many small tensors pay one latency, not one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.cluster.run import Run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import Violation
from overlaplab.program import Program
from overlaplab.timeline import Timeline
from overlaplab_course.lab04.board import (
    BOARD,
    NUM_RANKS,
    Inputs,
    play,
    sent_bytes,
    wire_bytes,
)

VALUES = "every tensor holds its sum, in place, in its own dtype"
SAFE = "nothing reads a sum before it is there"
DTYPES = "each message has one dtype, as NCCL asks"
LATENCY = "at most two latencies stand in the critical path, one a dtype"
BYTES = "no byte travels that is not asked for"

# What a step collects beside its gradients: norms, losses, counts.
FLOATS = ((250,), (250,), (), (40, 5), (1000,), ()) * 5
COUNTS = ((), (16,), (64,), ()) * 2

# Launches cost nothing here, as in a CUDA graph: what is left of a message is alpha.
CAPTURED = replace(BOARD, name="board, captured", launch_ns=0, collective_launch_ns=0)

SumAll = Callable[[Sequence[torch.Tensor]], Any]


@lru_cache(maxsize=1)
def small_inputs() -> Inputs:
    """([tensor, ...],) of each rank: float32 and int64, some with one element."""
    made = []
    for rank in range(NUM_RANKS):
        draw = torch.Generator().manual_seed(60 + rank)
        floats = [torch.randn(shape, generator=draw) for shape in FLOATS]
        # Counts that float32 would round.
        counts = [
            torch.randint(2**40, 2**41, shape, generator=draw) for shape in COUNTS
        ]
        mixed: list[torch.Tensor] = []
        for i, tensor in enumerate(floats):
            mixed.append(tensor)
            if i % 4 == 3 and counts:
                mixed.append(counts.pop())
        made.append(([*mixed, *counts],))
    return made


def one_by_one(tensors: Sequence[torch.Tensor]) -> None:
    """A message for each."""
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def step(tensors: Sequence[torch.Tensor], sum_all: SumAll) -> list[torch.Tensor]:
    """What is graded: the tensors, read right after the call."""
    sum_all(tensors)
    return [tensor.clone() for tensor in tensors]


def play_small(sum_all: SumAll) -> Run:
    """Sum 38 small tensors over four ranks of the board, captured."""
    return play(step, small_inputs(), sum_all, hardware=CAPTURED)


def latencies(timeline: Timeline) -> float:
    """How many of the link's latencies stand in the critical path."""
    return timeline.critical_path().shares_ns["latency"] / BOARD.link.latency_ns


@exercise(
    "4.5",
    title="many small tensors",
    solution="sum_all",
    verifies=(VALUES, SAFE, DTYPES, LATENCY, BYTES),
    points=2,
    optional=True,
    timeout_s=90.0,
)
def grade_small(sheet: Sheet, sum_all: SumAll) -> None:
    """Any way of sending them together."""
    inputs = small_inputs()
    sheet.ran(f"your function on {len(inputs[0][0])} tensors, 4 ranks")
    seen = play_small(sum_all)
    assert seen.program is not None
    flat = play_small(_flat).timeline.step_ns
    sheet.show(seen.timeline.of_rank(0), step_ns=seen.timeline.step_ns, target_ns=flat)
    sheet.verify(SAFE, laws.no_findings_law(seen.warnings))
    sheet.verify(VALUES, _wrong_sums(seen.values))
    sheet.verify(VALUES, laws.origin_law(seen.program, what="a sum"))
    sheet.stop_if_wrong()
    sheet.verify(DTYPES, _mixed(seen.program))
    count = latencies(seen.timeline)
    sheet.expect(
        LATENCY,
        count <= 2.05,
        seen=f"{count:.0f} latencies of {BOARD.link.latency_ns / 1e3:.0f} us",
        expected="2",
        hint="tensors of one dtype fit into one message",
    )
    asked = sum(
        -(-t.numel() * t.itemsize // NUM_RANKS) * NUM_RANKS for t in inputs[0][0]
    )
    most = wire_bytes("all_reduce", NUM_RANKS, asked)
    sent = max(sent_bytes(seen.program, rank) for rank in range(NUM_RANKS))
    sheet.expect(
        BYTES,
        sent <= most + len(inputs[0][0]),
        seen=f"{sent} bytes crossed the link of one rank",
        expected=f"at most {most}",
        hint="what do padding, casts or a gather add?",
    )


@lru_cache(maxsize=1)
def _target_ns() -> int:
    return play_small(_flat).timeline.step_ns


def _mixed(program: Program) -> list[Violation]:
    found = []
    for op in program.ranks[0]:
        if op.collective is None:
            continue
        dtypes = sorted({part.dtype for part in op.collective.payload})
        if len(dtypes) > 1:
            found.append(
                Violation(
                    "dtype",
                    f"a message of {len(op.collective.payload)} tensors has "
                    f"{' and '.join(dtypes)}",
                    "one dtype: NCCL and gloo refuse another",
                )
            )
    return found


def _wrong_sums(values: Sequence[Any]) -> list[Violation]:
    ranks = [tensors for (tensors,) in small_inputs()]
    found = []
    for dtype in (torch.int64, torch.float32):
        right = {
            f"tensor {i}": torch.stack(parts).sum(0)
            for i, parts in enumerate(zip(*ranks, strict=True))
            if parts[0].dtype is dtype
        }
        seen = [{f"tensor {i}": t for i, t in enumerate(value)} for value in values]
        found += laws.values_law(seen, right, what="the value")
    return found


def _flat(tensors: Sequence[torch.Tensor]) -> None:
    for dtype in (torch.float32, torch.int64):
        chosen = [t for t in tensors if t.dtype is dtype]
        flat = torch.cat([t.reshape(-1) for t in chosen])
        dist.all_reduce(flat)
        start = 0
        for tensor in chosen:
            part = flat[start : start + tensor.numel()]
            tensor.copy_(part.view_as(tensor))
            start += tensor.numel()
