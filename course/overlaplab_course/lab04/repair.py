"""Exercises 4.8a and 4.8b: a sum read too early, and one tensor in flight three times.

Both programs are public bugs in small. The learner's number draws the widths, so that
what there is to find differs from desk to desk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.cluster.run import Run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import Violation
from overlaplab.program import Program
from overlaplab_course.lab04.board import (
    NUM_RANKS,
    Inputs,
    play,
    sent_bytes,
    wire_bytes,
)
from overlaplab_course.lab04.waits import wrong_results

DIAGNOSIS = "the diagnosis is what the broken program's run shows"
VALUES = "the result is right on every rank"
SAFE = "nothing touches a tensor while it is being summed, and all is waited for"
KEPT = "the message still has the side branch beside it: within 2 % of the best"
BYTES = "each rank's gradient travels once"
SHORT = "the step is as short as one message at the end makes it, within 2 %"

ROWS = 200
WIDTH = 400
Weights = Sequence[dict[str, torch.Tensor]]
Blocks = Callable[[torch.Tensor, Weights], torch.Tensor]
Micros = Sequence[tuple[torch.Tensor, torch.Tensor]]
Accumulate = Callable[[Micros], torch.Tensor]


@dataclass(frozen=True)
class Patient:
    """What belongs to one learner's number.

    Args:
        widths: of the side branch of each block.
        tokens: of each micro-batch.
    """

    widths: tuple[int, ...]
    tokens: tuple[int, ...]

    def blocks(self) -> Inputs:
        """(x, weights) of each rank; `weights[i]` has "in", "side" and "back"."""
        made = []
        for rank in range(NUM_RANKS):
            draw = torch.Generator().manual_seed(300 + rank)
            # The residual stream is the same on all ranks.
            same = torch.Generator().manual_seed(299)
            x = torch.randn(ROWS, WIDTH, generator=same)
            weights = [
                {
                    "in": _matrix(WIDTH, WIDTH, draw) / 2,
                    "side": _matrix(WIDTH, width, same),
                    "back": _matrix(width, WIDTH, same),
                }
                for width in self.widths
            ]
            made.append((x, weights))
        return made

    def micros(self) -> Inputs:
        """([(a, b), ...],) of each rank: a @ b is a micro-batch's gradient."""
        made = []
        for rank in range(NUM_RANKS):
            draw = torch.Generator().manual_seed(400 + rank)
            made.append(
                (
                    [
                        (
                            torch.randn(250, n, generator=draw) / n**0.5,
                            torch.randn(n, 400, generator=draw),
                        )
                        for n in self.tokens
                    ],
                )
            )
        return made

    def play_blocks(self, blocks: Blocks) -> Run:
        """`blocks(x, weights)` on four ranks of the board."""
        return play(blocks, self.blocks())

    def play_micros(self, accumulate: Accumulate) -> Run:
        """`accumulate(micros)` on four ranks of the board."""
        return play(accumulate, self.micros())


def _matrix(n: int, m: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(n, m, generator=draw).div_(n**0.5)


@lru_cache(maxsize=16)
def patient(number: int) -> Patient:
    """The programs of a learner's number."""
    draw = random.Random(int(number))
    widths = tuple(draw.choice((250, 300, 350)) for _ in range(draw.choice((2, 3))))
    tokens = tuple(draw.choice((400, 500, 600)) for _ in range(3))
    return Patient(widths, tokens)


# -- the broken programs and their repairs


def broken_blocks(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Adds the message before it is summed."""
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        side = (x @ w["side"]).relu() @ w["back"]
        x = x + part
        work.wait()
        x = x + side
    return x


def repaired_blocks(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Waits before the sum is read, and not before the side branch is launched."""
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        side = (x @ w["side"]).relu() @ w["back"]
        work.wait()
        x = x + part
        x = x + side
    return x


def broken_accumulation(micros: Micros) -> torch.Tensor:
    """Sums one tensor over the ranks again after each micro-batch."""
    works = []
    grad = torch.zeros(250, 400)
    for a, b in micros:
        grad += a @ b
        works.append(dist.all_reduce(grad, async_op=True))
    for work in works:
        work.wait()
    return grad


def repaired_accumulation(micros: Micros) -> torch.Tensor:
    """One message, when the gradient is whole."""
    grad = torch.zeros(250, 400)
    for a, b in micros:
        grad += a @ b
    dist.all_reduce(grad)
    return grad


def luck_us(run: Run) -> float:
    """How long after its message's end the first unordered reader of rank 0 starts."""
    spans = {
        span.attributes.get("op"): span
        for span in run.timeline.of_rank(0).spans
        if span.kind != "launch"
    }
    hazard = next(f for f in run.warnings if f.kind == "hazard" and f.rank == 0)
    message, reader = (spans[op] for op in hazard.ops)
    return (reader.start_ns - message.end_ns) / 1e3


@lru_cache(maxsize=4)
def _blocks_facts(own: Patient) -> tuple[float, int]:
    """The luck of the broken blocks in us, the step of the repaired ones in ns."""
    broken = own.play_blocks(broken_blocks)
    repaired = own.play_blocks(repaired_blocks)
    return luck_us(broken), repaired.timeline.step_ns


@lru_cache(maxsize=4)
def _micros_best_ns(own: Patient) -> int:
    return own.play_micros(repaired_accumulation).timeline.step_ns


def _blocks_oracle(inputs: Inputs) -> list[torch.Tensor]:
    x = inputs[0][0]
    for i, w in enumerate(inputs[0][1]):
        total = sum(x @ weights[i]["in"] for _, weights in inputs)
        x = x + total + (x @ w["side"]).relu() @ w["back"]
    return [x] * len(inputs)


def _micros_oracle(inputs: Inputs) -> list[torch.Tensor]:
    total = sum(a @ b for (micros,) in inputs for a, b in micros)
    assert isinstance(total, torch.Tensor)
    return [total] * len(inputs)


# -- the graders


@exercise(
    "4.8a",
    title="repair: half of a sum",
    solution=("my_number", "first_diagnosis", "blocks"),
    verifies=(DIAGNOSIS, SAFE, VALUES, KEPT),
    points=2,
    optional=True,
    timeout_s=90.0,
)
def grade_early(
    sheet: Sheet, my_number: int, first_diagnosis: Mapping[str, Any], blocks: Blocks
) -> None:
    """The wait stands before the reader, and after what needs no sum."""
    own = patient(my_number)
    luck, best = _blocks_facts(own)
    truth = {
        "kind": "read before the wait",
        "messages": len(own.widths),
        "luck_us": luck,
    }
    _diagnose(sheet, first_diagnosis, truth)
    sheet.ran(f"your blocks: {len(own.widths)} of them on 4 ranks")
    seen = own.play_blocks(blocks)
    sheet.show(seen.timeline.of_rank(0), step_ns=seen.timeline.step_ns, target_ns=best)
    sheet.verify(SAFE, laws.no_findings_law(seen.warnings))
    assert seen.program is not None
    sheet.verify(VALUES, wrong_results(seen.values, _blocks_oracle(own.blocks())))
    sheet.verify(VALUES, laws.origin_law(seen.program))
    sheet.stop_if_wrong()
    sheet.verify(KEPT, laws.step_law(seen.timeline.step_ns, best))


@exercise(
    "4.8b",
    title="repair: summed again and again",
    solution=("my_number", "second_diagnosis", "accumulate"),
    verifies=(DIAGNOSIS, SAFE, VALUES, BYTES, SHORT),
    points=2,
    optional=True,
    timeout_s=90.0,
)
def grade_again(
    sheet: Sheet,
    my_number: int,
    second_diagnosis: Mapping[str, Any],
    accumulate: Accumulate,
) -> None:
    """One message a gradient, when it is whole."""
    own = patient(my_number)
    num_micros = len(own.tokens)
    truth = {
        "kind": "sent again",
        "messages_in_flight": num_micros,
        "weight_of_the_first": NUM_RANKS ** (num_micros - 1),
    }
    _diagnose(sheet, second_diagnosis, truth)
    sheet.ran(f"your accumulation: {num_micros} micro-batches on 4 ranks")
    seen = own.play_micros(accumulate)
    best = _micros_best_ns(own)
    sheet.show(seen.timeline.of_rank(0), step_ns=seen.timeline.step_ns, target_ns=best)
    assert seen.program is not None
    sheet.verify(SAFE, laws.no_findings_law(seen.warnings))
    sheet.verify(VALUES, wrong_results(seen.values, _micros_oracle(own.micros())))
    sheet.verify(VALUES, laws.origin_law(seen.program))
    sheet.verify(BYTES, _more_than_once(seen.program))
    sheet.stop_if_wrong()
    sheet.verify(SHORT, laws.step_law(seen.timeline.step_ns, best))


def _diagnose(
    sheet: Sheet, said: Mapping[str, Any], truth: Mapping[str, object]
) -> None:
    if not isinstance(said, Mapping):
        raise TypeError(f"the diagnosis is {type(said).__name__}; expected a dict")
    sheet.verify(DIAGNOSIS, laws.diagnosis_law(said, truth), list_all=True)


def _more_than_once(program: Program) -> list[Violation]:
    wanted = wire_bytes("all_reduce", NUM_RANKS, 250 * 400 * 4)
    sent = max(sent_bytes(program, rank) for rank in range(NUM_RANKS))
    if sent <= wanted + NUM_RANKS:
        return []
    return [
        Violation(
            "bytes",
            f"{sent} bytes crossed the link of one rank",
            f"{wanted}, as for one gradient",
            "when is the gradient whole?",
        )
    ]
