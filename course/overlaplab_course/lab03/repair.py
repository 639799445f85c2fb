"""Exercises 3.3a, b and c: find a race in your own run, and repair it.

The learner's number draws the sizes (`repair_cases`), hence the tensor, the rank and
the batch that are concerned. The broken programs are in `broken`, the course's repairs
in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from overlaplab import streams
from overlaplab.grading import origins
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import Examined, Repair
from overlaplab.grading.violation import Violation
from overlaplab.timeline import Timeline
from overlaplab_course.lab03 import broken, reference, repair_cases
from overlaplab_course.lab03.play import (
    NUM_RANKS,
    SET_UP,
    SLOW,
    by_label,
)
from overlaplab_course.lab03.waiting import cpu_waits, crowded, packed_in_turn

DIAGNOSIS = "the diagnosis is right"
SAFE = "no stream touches bytes that another may still use"
VALUES = "every result is right on every rank"
FREE_CPU = "the CPU waits for nothing"
SHORT = "the overlap is kept: the step is as short as the reference's"
LEAN = "Python holds at most three batches at a time"
BESIDE = "each pack runs beside the next layer's backward pass"
KINDS = ("race", "reuse", "unwaited")

Program = Callable[..., object]


class Seen(Examined):
    """One run of a case."""

    @property
    def timeline(self) -> Timeline:
        """Both ranks, the tasks' names on the spans."""
        return by_label(self.run.timeline)


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
        return Seen.of(_on_rank, self, program, world_size=NUM_RANKS, hardware=SLOW)

    def as_handed_out(self) -> Seen:
        """Run the program as the lab hands it out, whatever was repaired since."""
        return _handed_out(self.exercise, self.number)


@dataclass(frozen=True)
class _Kind:
    """What a case is made of: its program's arguments, results and diagnosis."""

    make: Callable[[int], tuple[tuple[Any, ...], Callable[[], dict[str, torch.Tensor]]]]
    truth: Callable[[int], Mapping[str, object]]
    broken: Program
    reference: Program


def _on_rank(case: Case, program: Program) -> origins.Held:
    with streams.annotate(SET_UP):
        arguments, results = _CASES[case.exercise].make(case.number)
        streams.synchronize()

    def collected(_: object) -> dict[str, torch.Tensor]:
        with streams.annotate("collect"):
            return {name: t.clone() for name, t in results().items()}

    return origins.hold(program, *arguments, results=collected)


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
        repair_cases.layers,
        repair_cases.flat_truth,
        broken.send_gradients,
        reference.send_gradients,
    ),
    "3.3b": _Kind(
        repair_cases.towers, repair_cases.event_truth, broken.look_up, reference.look_up
    ),
    "3.3c": _Kind(repair_cases.batches, _reuse_truth, broken.train, reference.train),
}


def right_diagnosis(case: Case) -> Mapping[str, object]:
    """What the run of the broken program shows."""
    return _CASES[case.exercise].truth(case.number)


@lru_cache(maxsize=32)
def _handed_out(exercise_id: str, number: int) -> Seen:
    return Case(exercise_id, number).run(_CASES[exercise_id].broken)


_WHERE = {  # in the report of a finding
    "kind": "'nothing orders them' is a race; 'handed out again' is a reuse",
    "rank": "rank: look at the finding's first line",
    "tensor": "tensor: look at the finding's first line",
    "packed_on": "packed_on: the stream of pack's line",
    "overwritten_by": "overwritten_by: the end of the line 'then written'",
}


def _repair(exercise_id: str, **also: Callable[[Examined], list[Violation]]) -> Repair:
    """The repair of one program, by the sentences of `also`, too."""
    kind = _CASES[exercise_id]
    return Repair(
        diagnosis=DIAGNOSIS,
        safe=SAFE,
        values=VALUES,
        kept=SHORT,
        truth=kind.truth,
        play=lambda number, program: Case(exercise_id, number).run(program),
        reference=kind.reference,
        wrong=lambda _, seen, right: wrong_results(seen, right),
        ran="your program on the objects of number {number}, 2 ranks",
        also={FREE_CPU: lambda seen: cpu_waits(seen.run), **also},
        where=_WHERE,
        title="your repair",
        hint="what waits now that need not?",
    )


FLAT = _repair("3.3a", **{BESIDE: lambda seen: packed_in_turn(seen.run)})
EVENT = _repair("3.3b")
REUSE = _repair("3.3c", **{LEAN: lambda seen: crowded(seen.run, 3)})


@exercise(
    "3.3a",
    title="a race: filled here, sent there",
    solution=("my_number", "flat_diagnosis", "send_gradients"),
    verifies=(DIAGNOSIS, SAFE, VALUES, FREE_CPU, SHORT, BESIDE),
    points=2,
    timeout_s=30.0,
)
def grade_flat(sheet: Sheet, my_number: int, said: object, repaired: Program) -> None:
    """The edge is there, and nothing waits that need not."""
    FLAT.grade(sheet, my_number, said, repaired)


@exercise(
    "3.3b",
    title="a race: one event for two",
    solution=("my_number", "event_diagnosis", "look_up"),
    verifies=(DIAGNOSIS, SAFE, VALUES, FREE_CPU, SHORT),
    points=2,
    timeout_s=30.0,
)
def grade_event(sheet: Sheet, my_number: int, said: object, repaired: Program) -> None:
    """Every tower is waited for, and they still overlap."""
    EVENT.grade(sheet, my_number, said, repaired)


@exercise(
    "3.3c",
    title="a race: memory given away",
    solution=("my_number", "reuse_diagnosis", "train"),
    verifies=(DIAGNOSIS, SAFE, VALUES, FREE_CPU, SHORT, LEAN),
    points=2,
    timeout_s=30.0,
)
def grade_reuse(sheet: Sheet, my_number: int, said: object, repaired: Program) -> None:
    """The memory is kept while it is read, not longer, and copies still overlap."""
    REUSE.grade(sheet, my_number, said, repaired)


def wrong_results(seen: Examined, right: Examined) -> list[Violation]:
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
