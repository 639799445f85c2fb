"""Exercises 3.3a, b and c: find a race in your own run, and repair it.

The learner's number draws the sizes, hence the tensor, the rank and the batch that are
concerned. The broken programs are in `broken`, the course's repairs in `reference`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.lab03 import broken, reference
from overlaplab.grading.lab03.play import (
    NUM_RANKS,
    SET_UP,
    SLOW,
    WIDTH,
    by_label,
    compute,
)
from overlaplab.grading.lab03.waiting import cpu_waits, crowded
from overlaplab.grading.violation import Violation
from overlaplab.program import Finding
from overlaplab.timeline import Timeline

DIAGNOSIS = "the diagnosis is right"
SAFE = "no stream touches bytes that another may still use"
VALUES = "every result is right on every rank"
FREE_CPU = "the CPU waits for nothing"
SHORT = "the overlap is kept: the step is as short as the reference's"
LEAN = "at most three batches are on the device at a time"
KINDS = ("race", "reuse", "unwaited")

Program = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Seen:
    """One run of a case.

    Args:
        run: what the virtual cluster recorded.
        values: by rank, the results.
    """

    run: Run
    values: tuple[Mapping[str, torch.Tensor], ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Races and the like, in the order of ranks."""
        return self.run.warnings

    @property
    def timeline(self) -> Timeline:
        """Both ranks, the tasks' names on the spans."""
        return by_label(self.run.timeline)

    @property
    def step_ns(self) -> int:
        return self.run.timeline.step_ns


@dataclass(frozen=True)
class Case:
    """One learner's broken program and what it works on.

    Args:
        exercise: "3.3a".
        number: the learner's.
    """

    exercise: str
    number: int

    def run(self, program: Program) -> Seen:
        """Run `program` on this learner's objects, on two ranks."""
        recorded = run(
            _on_rank,
            self,
            program,
            world_size=NUM_RANKS,
            hardware=SLOW,
        )
        return Seen(recorded, recorded.values)

    def as_handed_out(self) -> Seen:
        """Run the program as the lab hands it out, whatever was repaired since."""
        return _handed_out(self.exercise, self.number)


class Layer:
    """A layer of 3.3a.

    `grads` holds one or two gradients, `flat` what is sent. With one gradient, `flat`
    is that gradient. All are on the device.
    """

    def __init__(self, number: int, num_grads: int, start: torch.Tensor) -> None:
        device = streams.device()
        rows = 2 * WIDTH
        self.number = number
        self.grads = [torch.zeros(rows, WIDTH, device=device) for _ in range(num_grads)]
        self.flat = self.grads[0]
        if num_grads > 1:
            self.flat = torch.zeros(rows * num_grads, WIDTH, device=device)
        for grad, letter in zip(self.grads, "ab", strict=False):
            streams.name_tensor(grad, f"grad {number}{letter}")
        streams.name_tensor(self.flat, f"flat {number}")
        self._start = start

    def backward(self) -> None:
        """Compute the gradients: 4 ms on the current stream."""
        with streams.annotate(f"back {self.number}"):
            units = 4 // len(self.grads)
            for grad in self.grads:
                compute([self._start], grad[:WIDTH], units)
                grad[WIDTH:].copy_(grad[:WIDTH])

    def pack(self) -> None:
        """Copy the gradients into `flat`: 1 ms on the current stream."""
        with streams.annotate(f"pack {self.number}"):
            torch.cat(self.grads, out=self.flat)
            compute([self.flat[:WIDTH]], self.flat[:WIDTH], 1)


class Tower:
    """A tower of 3.3c: rows of a table in the host's memory, and a layer."""

    def __init__(self, letter: str, fetch_ms: int, forward_ms: int) -> None:
        device = streams.device()
        self.letter = letter
        shape = (WIDTH * fetch_ms, WIDTH)
        values = torch.full(shape, 0.1 + 0.1 * ord(letter) % 7, device="cpu")
        self._host = values.pin_memory()
        self.rows = torch.zeros(shape, device=device)
        self.out = torch.zeros(WIDTH, WIDTH, device=device)
        streams.name_tensor(self.rows, f"rows {letter}")
        streams.name_tensor(self.out, f"out {letter}")
        self._units = forward_ms

    def fetch(self) -> None:
        """Copy its rows to the device, on the current stream."""
        with streams.annotate(f"fetch {self.letter}"):
            self.rows.copy_(self._host, non_blocking=True)

    def forward(self) -> None:
        """Compute `out` from the rows, on the current stream."""
        with streams.annotate(f"tower {self.letter}"):
            compute([self.rows[:WIDTH]], self.out, self._units)


@dataclass(frozen=True)
class _Kind:
    """What a case is made of: its program's arguments, results and diagnosis."""

    make: Callable[[int], tuple[tuple[Any, ...], Callable[[], dict[str, torch.Tensor]]]]
    truth: Callable[[int], Mapping[str, object]]
    broken: Program
    reference: Program


def _on_rank(case: Case, program: Program) -> dict[str, torch.Tensor]:
    with streams.annotate(SET_UP):
        arguments, results = _CASES[case.exercise].make(case.number)
        streams.synchronize()
    program(*arguments)
    tensors = results()
    with streams.annotate("collect"):
        return {name: t.clone() for name, t in tensors.items()}


# -- 3.3a: a flat buffer is filled on one stream and sent from another


def _num_grads(number: int) -> list[int]:
    """Of each layer, in the order of the backward pass; the first has one."""
    draw = random.Random(11 * int(number) + 3)
    rest = [1, 2, 2, draw.choice((1, 2))]
    draw.shuffle(rest)
    return [1, *rest]


def _layers(number: int) -> Any:
    counts = _num_grads(number)
    seed = torch.Generator().manual_seed(dist.get_rank())
    start = torch.randn(WIDTH, WIDTH, generator=seed)
    layers = [Layer(len(counts) - i, n, start) for i, n in enumerate(counts)]
    return (layers,), lambda: {f"flat {x.number}": x.flat for x in layers}


def _flat_truth(number: int) -> Mapping[str, object]:
    counts = _num_grads(number)
    first = len(counts) - counts.index(2)
    return {"kind": "race", "tensor": f"flat {first}", "packed_on": "stream 1"}


# -- 3.3b: one event for several streams; one rank has several


def _tower_letters(number: int) -> tuple[list[str], list[str]]:
    """Of rank 0 and rank 1: two towers on one of them, one on the other."""
    draw = random.Random(13 * int(number) + 5)
    letters = draw.sample("PQRSTUVW", 3)
    both = [letters[:2], letters[2:]]
    if draw.random() < 0.5:
        both.reverse()
    return both[0], both[1]


def _towers(number: int) -> Any:
    letters = _tower_letters(number)[dist.get_rank()]
    draw = random.Random(17 * int(number))
    # The first tower ends last: who waits for the second only, goes on too early.
    sizes = [(draw.choice((3, 4)), draw.choice((5, 6))), (2, 1)]
    towers = [Tower(x, *size) for x, size in zip(letters, sizes, strict=False)]

    def combine() -> dict[str, torch.Tensor]:
        made = {x.letter: torch.zeros_like(x.out) for x in towers}
        with streams.annotate("combine"):
            for tower in towers:
                compute([tower.out], made[tower.letter], 1)
        return made

    return (towers,), combine


def _event_truth(number: int) -> Mapping[str, object]:
    letters = _tower_letters(number)
    rank = 0 if len(letters[0]) == 2 else 1
    return {"kind": "race", "rank": rank, "tensor": f"out {letters[rank][0]}"}


# -- 3.3c: a batch's memory is given away while another stream still reads it


def _batch_ms(number: int) -> list[int]:
    """How long each batch takes to copy: two sizes, three of each."""
    draw = random.Random(19 * int(number) + 2)
    sizes = [2, 2, 2, 3, 3, 3]
    draw.shuffle(sizes)
    return sizes


def _batches(number: int) -> Any:
    sizes = _batch_ms(number)
    hosts = []
    for i, ms in enumerate(sizes, start=1):
        host = torch.full((WIDTH * ms, WIDTH), float(i), device="cpu").pin_memory()
        hosts.append(host)
    seen: dict[str, torch.Tensor] = {}

    def step(batch: torch.Tensor) -> None:
        index = len(seen) + 1
        streams.name_tensor(batch, f"batch {index}")
        out = torch.zeros(WIDTH, WIDTH, device=streams.device())
        seen[f"step {index}"] = out
        with streams.annotate(f"step {index}"):
            compute([batch[:WIDTH]], out, 4)

    return (hosts, step), lambda: dict(seen)


def _reuse_truth(number: int) -> Mapping[str, object]:
    """The first block that is given to a later batch too early, from the run itself."""
    seen = _handed_out("3.3c", number)
    program, first = seen.run.program, seen.findings[0]
    assert program is not None
    op = program.ranks[first.rank][first.ops[1]]
    now = {
        life.name
        for life in program.storages
        if life.rank == first.rank
        and life.storage in {access.storage for access in op.writes}
    }
    return {"kind": "reuse", "tensor": first.name, "overwritten_by": frozenset(now)}


_CASES: Mapping[str, _Kind] = {
    "3.3a": _Kind(
        _layers, _flat_truth, broken.send_gradients, reference.send_gradients
    ),
    "3.3b": _Kind(_towers, _event_truth, broken.look_up, reference.look_up),
    "3.3c": _Kind(_batches, _reuse_truth, broken.train, reference.train),
}


def right_diagnosis(case: Case) -> Mapping[str, object]:
    """What the run of the broken program shows."""
    return _CASES[case.exercise].truth(case.number)


@lru_cache(maxsize=32)
def _handed_out(exercise_id: str, number: int) -> Seen:
    return Case(exercise_id, number).run(_CASES[exercise_id].broken)


@lru_cache(maxsize=32)
def reference_run(exercise_id: str, number: int) -> Seen:
    """The course's repair on a learner's objects."""
    return Case(exercise_id, number).run(_CASES[exercise_id].reference)


@exercise(
    "3.3a",
    title="a race: filled here, sent there",
    solution=("my_number", "flat_diagnosis", "send_gradients"),
    verifies=(DIAGNOSIS, SAFE, VALUES, FREE_CPU, SHORT),
    points=2,
    timeout_s=30.0,
)
def grade_flat(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], repaired: Program
) -> None:
    """The edge is there, and nothing waits that need not."""
    _grade(sheet, Case("3.3a", my_number), said, repaired)


@exercise(
    "3.3b",
    title="a race: one event for two",
    solution=("my_number", "event_diagnosis", "look_up"),
    verifies=(DIAGNOSIS, SAFE, VALUES, FREE_CPU, SHORT),
    points=2,
    timeout_s=30.0,
)
def grade_event(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], repaired: Program
) -> None:
    """Every tower is waited for, and they still overlap."""
    _grade(sheet, Case("3.3b", my_number), said, repaired)


@exercise(
    "3.3c",
    title="a race: memory given away",
    solution=("my_number", "reuse_diagnosis", "train"),
    verifies=(DIAGNOSIS, SAFE, VALUES, FREE_CPU, SHORT, LEAN),
    points=2,
    timeout_s=30.0,
)
def grade_reuse(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], repaired: Program
) -> None:
    """The memory is kept while it is read, not longer, and copies still overlap."""
    case = Case("3.3c", my_number)
    seen = _grade(sheet, case, said, repaired)
    sheet.verify(LEAN, crowded(seen.run, 3))


def _grade(
    sheet: Sheet, case: Case, said: Mapping[str, Any], repaired: Program
) -> Seen:
    if not isinstance(said, Mapping):
        raise TypeError(f"the diagnosis is {type(said).__name__}; expected a dict")
    sheet.ran(f"your program on the objects of number {case.number}, 2 ranks")
    sheet.verify(
        DIAGNOSIS, laws.diagnosis_law(said, right_diagnosis(case)), list_all=True
    )
    seen, right = case.run(repaired), reference_run(case.exercise, case.number)
    sheet.show(
        seen.timeline,
        step_ns=seen.step_ns,
        target_ns=right.step_ns,
        title="your repair",
    )
    sheet.verify(SAFE, laws.no_findings_law(seen.findings))
    sheet.verify(VALUES, wrong_results(seen, right))
    sheet.verify(FREE_CPU, cpu_waits(seen.run))
    sheet.verify(
        SHORT,
        [
            replace(v, hint="what waits now that need not?")
            for v in laws.step_law(seen.step_ns, right.step_ns)
        ],
    )
    return seen


def wrong_results(seen: Seen, right: Seen) -> list[Violation]:
    """Every result on every rank is what the course's repair gives."""
    found = []
    for rank, (mine, ours) in enumerate(zip(seen.values, right.values, strict=True)):
        for name, tensor in ours.items():
            if name not in mine or not torch.allclose(mine[name], tensor, rtol=1e-5):
                found.append(
                    Violation(
                        "values",
                        f"{name} is wrong on rank {rank}",
                        "each is computed, packed, sent and stepped once",
                        rank=rank,
                    )
                )
    return found
