"""Exercise 4.1, and the table of collectives: four ranks, four numbers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.cluster.run import run
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


def _named(*names: str) -> Callable[..., Any]:
    """The first of these that this torch has: they mean the same."""
    found: Callable[..., Any] = next(
        getattr(dist, name) for name in names if hasattr(dist, name)
    )
    return found


# The newer name comes first: 2.13 warns of the older one.
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
all_gather = _named("all_gather_single", "all_gather_into_tensor")

VALUES = "every element is the sum over all ranks, in place, on every rank"
SIZES = "also where the size does not divide by the number of ranks"
PARTS = "it is made of a reduce-scatter and an all-gather, or of their equals"
BYTES = "as many bytes cross the wire as in an all-reduce"

SHAPE = (400, 250)

SumInPlace = Callable[[torch.Tensor], Any]


def numbers(rank: int) -> torch.Tensor:
    """1 2 3 4, ten times as much on each next rank: sums read like words."""
    return torch.tensor([10**rank * digit for digit in (1, 2, 3, 4)])


def _collectives() -> dict[str, list[int]]:
    mine = numbers(dist.get_rank())
    world = dist.get_world_size()
    found = {"before": mine.tolist()}
    sent = mine.clone()
    dist.broadcast(sent, src=0)
    found["broadcast"] = sent.tolist()
    gathered = mine.new_empty(world)
    all_gather(gathered, mine[:1].clone())
    found["all_gather"] = gathered.tolist()
    part = mine.new_empty(1)
    reduce_scatter(part, mine)
    found["reduce_scatter"] = part.tolist()
    summed = mine.clone()
    dist.all_reduce(summed)
    found["all_reduce"] = summed.tolist()
    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine)
    found["all_to_all"] = exchanged.tolist()
    return found


@lru_cache(maxsize=1)
def after_each() -> dict[str, list[list[int]]]:
    """collective -> what each of four ranks holds after it; "before": before it."""
    values = run(_collectives, world_size=NUM_RANKS).values
    return {name: [value[name] for value in values] for name in values[0]}


def collectives_table() -> str:
    """What each rank holds after each collective, and what crosses its link."""
    lines = []
    for name, ranks in after_each().items():
        held = [" ".join(str(n) for n in values) for values in ranks]
        lines.append(f"{name:<15}" + "".join(f"{text:<22}" for text in held).rstrip())
    heading = f"{'':<15}" + "".join(f"{f'rank {r}':<22}" for r in range(NUM_RANKS))
    return "\n".join([heading.rstrip(), *lines])


def compare_predictions(said: Mapping[str, Any]) -> None:
    """What the learner said rank 1 holds, beside what it holds. Not marked."""
    for name, ranks in after_each().items():
        if name == "before":
            continue
        yours = said.get(name)
        told = "nothing" if yours is None else str(yours)
        print(f"{name:<15} you said {told:<24} it is {ranks[1]}")


def crossings(operation: str, num_ranks: int = NUM_RANKS) -> float:
    """How often the payload crosses one rank's link."""
    return wire_bytes(operation, num_ranks, 10**6) / 10**6


def sum_step(tensor: torch.Tensor, sum_in_place: SumInPlace) -> torch.Tensor:
    """What is graded: the tensor after `sum_in_place(tensor)`."""
    sum_in_place(tensor)
    return tensor


def _tensors(shape: Sequence[int], num_ranks: int) -> Inputs:
    made = []
    for rank in range(num_ranks):
        draw = torch.Generator().manual_seed(7 + rank)
        made.append((torch.randn(*shape, generator=draw),))
    return made


@exercise(
    "4.1",
    title="an all-reduce in two halves",
    solution="all_reduce_in_two",
    verifies=(VALUES, PARTS, BYTES, SIZES),
    points=2,
    timeout_s=90.0,
)
def grade_in_two(sheet: Sheet, all_reduce_in_two: SumInPlace) -> None:
    """Values on every rank; bytes from the record; then sizes that do not divide."""
    inputs = _tensors(SHAPE, NUM_RANKS)
    sheet.ran("your function on 400 x 250 elements, 4 ranks")
    seen = play(sum_step, inputs, all_reduce_in_two)
    sheet.show(
        seen.timeline.of_rank(0),
        step_ns=seen.timeline.step_ns,
        title="your run on 400 x 250 elements",
    )
    assert seen.program is not None
    sheet.verify(VALUES, _wrong_sums(seen.values, inputs))
    sheet.verify(VALUES, laws.origin_law(seen.program, what="the tensor"))
    sheet.verify(PARTS, _wrong_parts(seen.program))
    sheet.verify(BYTES, _wrong_bytes(seen.program, inputs))
    sheet.stop_if_wrong()
    for shape, num_ranks in (
        ((10,), 4),
        ((3,), 4),
        ((7, 3), 2),
        ((5,), 3),
        ((4, 5), 1),
    ):
        size = " x ".join(str(n) for n in shape)
        sheet.ran(f"your function on {size} elements, {num_ranks} ranks")
        inputs = _tensors(shape, num_ranks)
        seen = play(sum_step, inputs, all_reduce_in_two)
        sheet.verify(SIZES, _wrong_sums(seen.values, inputs))
        sheet.stop_if_wrong()
        assert seen.program is not None
        sheet.verify(PARTS, _wrong_parts(seen.program))
        sheet.verify(BYTES, _wrong_bytes(seen.program, inputs))
        sheet.stop_if_wrong()


def _wrong_sums(seen: Sequence[torch.Tensor], inputs: Inputs) -> list[Violation]:
    total = torch.stack([tensor for (tensor,) in inputs]).sum(0)
    given = [{"the tensor": value} for value in seen]
    found = laws.values_law(given, {"the tensor": total}, what="the value")
    unchanged = [
        rank
        for rank, ((before,), value) in enumerate(zip(inputs, seen, strict=True))
        if len(inputs) > 1 and torch.equal(before, value)
    ]
    if unchanged and found:
        hint = "the tensor itself did not change: write the result back into it"
        return [Violation(v.law, v.message, v.expected, hint) for v in found]
    return found


def _wrong_parts(program: Program) -> list[Violation]:
    used = _operations(program)
    if "all_reduce" not in used:
        return []
    return [
        Violation(
            "parts",
            f"rank 0 launched {', '.join(used)}",
            "no all_reduce inside: it is what you build",
        )
    ]


def _wrong_bytes(program: Program, inputs: Inputs) -> list[Violation]:
    num_ranks = len(inputs)
    tensor = inputs[0][0]
    padded = -(-tensor.numel() // num_ranks) * num_ranks * tensor.itemsize
    wanted = wire_bytes("all_reduce", num_ranks, padded)
    found = []
    for rank in range(num_ranks):
        sent = sent_bytes(program, rank)
        if abs(sent - wanted) <= num_ranks:  # each count is rounded up
            continue
        used = ", ".join(_operations(program)) or "nothing"
        found.append(
            Violation(
                "bytes",
                f"{sent} bytes crossed the link of rank {rank} ({used})",
                f"{wanted}: 2 x {num_ranks - 1}/{num_ranks} of the tensor, padded to "
                f"a multiple of {num_ranks} elements",
                "which bytes travel that nobody needs?"
                if sent > wanted
                else "each rank needs the finished parts of all others",
            )
        )
    return found


def _operations(program: Program) -> list[str]:
    return [op.collective.operation for op in program.ranks[0] if op.collective]
