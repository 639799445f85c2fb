"""Exercises 3.3a, b and c: find a race in your own run, and repair it.

The learner's number draws the sizes (`repair_cases`), hence the tensor, the rank and
the batch that are concerned. The broken programs are in `broken`, the course's repairs
in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from overlaplab import streams
from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws, origins
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.violation import Violation
from overlaplab.program import Finding
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
        recorded = origins.release(recorded)
        return Seen(recorded, recorded.values)

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
    before = origins.given(arguments)
    program(*arguments)
    tensors = results()
    with streams.annotate("collect"):
        copies = {name: t.clone() for name, t in tensors.items()}
    return origins.Held(copies, (*before, *origins.returned(copies)))


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


@lru_cache(maxsize=32)
def reference_run(exercise_id: str, number: int) -> Seen:
    """The course's repair on a learner's objects."""
    return Case(exercise_id, number).run(_CASES[exercise_id].reference)


@exercise(
    "3.3a",
    title="a race: filled here, sent there",
    solution=("my_number", "flat_diagnosis", "send_gradients"),
    verifies=(DIAGNOSIS, SAFE, VALUES, FREE_CPU, SHORT, BESIDE),
    points=2,
    timeout_s=30.0,
)
def grade_flat(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], repaired: Program
) -> None:
    """The edge is there, and nothing waits that need not."""
    seen = _grade(sheet, Case("3.3a", my_number), said, repaired)
    sheet.verify(BESIDE, packed_in_turn(seen.run))


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
    sheet.verify(DIAGNOSIS, wrong_diagnosis(said, right_diagnosis(case)), list_all=True)
    seen, right = case.run(repaired), reference_run(case.exercise, case.number)
    sheet.show(
        seen.timeline,
        step_ns=seen.step_ns,
        target_ns=right.step_ns,
        title="your repair",
    )
    sheet.verify(SAFE, laws.no_findings_law(seen.findings))
    sheet.verify(VALUES, wrong_results(seen, right))
    assert seen.run.program is not None
    sheet.verify(VALUES, laws.origin_law(seen.run.program))
    sheet.verify(FREE_CPU, cpu_waits(seen.run))
    sheet.verify(
        SHORT,
        [
            replace(v, hint="what waits now that need not?")
            for v in laws.step_law(seen.step_ns, right.step_ns)
        ],
    )
    return seen


def wrong_diagnosis(
    said: Mapping[str, Any], truth: Mapping[str, object]
) -> list[Violation]:
    """What is not filled in, in one line; and each answer that is wrong."""
    empty = [key for key in truth if said.get(key) is None]
    found = []
    if empty:
        found.append(
            Violation(
                "diagnosis",
                f"not filled in: {', '.join(empty)}",
                "what the first finding of the program as given shows",
            )
        )
    for key in truth:
        if key not in empty and laws.diagnosis_law(said, {key: truth[key]}):
            found.append(
                Violation(
                    "diagnosis",
                    f"{key}: {said[key]!r} is not what the run shows",
                    f"the {key} in the first finding",
                    _WHERE[key],
                )
            )
    return found


_WHERE = {  # in the report of a finding
    "kind": "'nothing orders them' is a race; 'handed out again' is a reuse",
    "rank": "rank: look at the finding's first line",
    "tensor": "tensor: look at the finding's first line",
    "packed_on": "packed_on: the stream of pack's line",
    "overwritten_by": "overwritten_by: the end of the line 'then written'",
}


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
