"""Exercises 6.5a and 6.5b: find what is wrong with a reducer, and repair it.

The learner's number draws the net, hence which messages and buckets show the fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from overlaplab.grading import fixtures, laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.fixtures import Fixture, Trained
from overlaplab_course.lab06.broken import FirstReducer
from overlaplab_course.lab06.reduce import (
    ONCE,
    PROMPT,
    SAFE,
    STEPS,
    MakeReducer,
    our_finish,
    wrong_values,
)
from overlaplab_course.lab06.reference import install_hooks, plan_buckets
from overlaplab_course.lab06.state import ReducerState

DIAGNOSIS = "the diagnosis is right"
VALUES = "gradients are right on every rank, in every step"
KINDS = ("sent again", "never sent", "race", "blocked")
NUM_LAYERS = 9


class _Uneven(torch.nn.Module):
    """Square layers in groups of one or two widths, so that buckets differ."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@dataclass(frozen=True)
class _Make:
    widths: tuple[int, ...]

    def __call__(self) -> torch.nn.Module:
        return _Uneven(self.widths)


@dataclass(frozen=True)
class _Samples:
    width: int

    def __call__(self, rank: int, step: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(100 * rank + step)
        return (torch.randn(32, self.width, generator=generator),)


@dataclass(frozen=True)
class Patient:
    """One learner's net, and how its gradients are cut into buckets."""

    fixture: Fixture
    cap_bytes: int

    def train(self, make_reducer: Callable[[ReducerState], Any]) -> Trained:
        """Three steps on two ranks with the reducer that `make_reducer` makes."""
        return fixtures.train(self.fixture, _MakeFrom(make_reducer, self.cap_bytes))

    def buckets(self) -> list[list[str]]:
        model = self.fixture.build(0)
        names = [name for name, _ in model.named_parameters()]
        plan = plan_buckets(list(model.parameters()), self.cap_bytes)
        return [[names[i] for i in bucket] for bucket in plan]


@dataclass(frozen=True)
class _MakeFrom:
    make: Callable[[ReducerState], Any]
    cap_bytes: int

    def __call__(self, model: torch.nn.Module) -> Any:
        plan = plan_buckets(list(model.parameters()), self.cap_bytes)
        return self.make(ReducerState.of(model, plan))


@lru_cache(maxsize=16)
def patient(number: int) -> Patient:
    """The net that belongs to a learner's number.

    Narrow and wide layers in an order of its own; a wide layer is a bucket of its own,
    narrow ones share. The first bucket is a wide layer or two, then narrow ones follow.
    """
    draw = random.Random(int(number))
    num_wide = draw.choice((1, 2, 3))
    widths = [96] * (num_wide + 1)  # last layers: the first buckets
    while len(widths) < NUM_LAYERS + draw.choice((0, 1)):
        widths.append(draw.choice((48, 56, 64)))
    chosen = tuple(reversed(widths))
    fixture = Fixture("yours", _Make(chosen), _Samples(chosen[0]), same_seed=True)
    return Patient(fixture, cap_bytes=96 * 96 * 4)


@exercise(
    "6.5a",
    title="repair: slow after a while",
    solution=("my_number", "first_diagnosis", "FirstReducer"),
    verifies=(DIAGNOSIS, VALUES, ONCE, SAFE, PROMPT),
    points=2,
    optional=True,
    timeout_s=30.0,
)
def grade_resending(
    sheet: Sheet,
    my_number: int,
    first_diagnosis: Mapping[str, Any],
    repaired: Callable[[ReducerState], Any],
) -> None:
    """The fault is gone, the values are right, the overlap is still there."""
    own = patient(my_number)
    broken = own.train(FirstReducer).evidence
    truth = {
        "kind": "sent again",
        "step": 2,
        "messages": len(broken.sends_of(0, 2)),
    }
    _diagnose(sheet, first_diagnosis, truth)
    _examine(sheet, own, repaired)


@exercise(
    "6.5b",
    title="repair: wrong at times",
    solution=("my_number", "second_diagnosis", "SecondReducer"),
    verifies=(DIAGNOSIS, VALUES, ONCE, SAFE, PROMPT),
    points=2,
    optional=True,
    timeout_s=30.0,
)
def grade_racing(
    sheet: Sheet,
    my_number: int,
    second_diagnosis: Mapping[str, Any],
    repaired: Callable[[ReducerState], Any],
) -> None:
    """The edge is there, and nothing waits that need not."""
    own = patient(my_number)
    first = next(b for b, names in enumerate(own.buckets()) if len(names) > 1)
    truth = {"kind": "race", "bucket": first, "written_on": "stream 1"}
    _diagnose(sheet, second_diagnosis, truth)
    _examine(sheet, own, repaired)


def _diagnose(
    sheet: Sheet, said: Mapping[str, Any], truth: Mapping[str, object]
) -> None:
    if not isinstance(said, Mapping):
        raise TypeError(f"the diagnosis is {type(said).__name__}; expected a dict")
    sheet.verify(DIAGNOSIS, laws.diagnosis_law(said, truth), list_all=True)


def _examine(
    sheet: Sheet, own: Patient, repaired: Callable[[ReducerState], Any]
) -> None:
    sheet.ran(f"your reducer: {STEPS} steps of your net on 2 ranks")
    trained = own.train(repaired)
    reference = fixtures.train(
        own.fixture, MakeReducer(install_hooks, our_finish, own.cap_bytes)
    )
    evidence = trained.evidence
    sheet.show(
        evidence.step_timeline(2),
        step_ns=evidence.step_ns[1],
        target_ns=reference.evidence.step_ns[1],
    )
    sheet.verify(ONCE, laws.once_law(evidence))
    sheet.verify(SAFE, laws.no_findings_law(trained.run.warnings))
    sheet.verify(VALUES, wrong_values(trained, own.fixture, 2))
    sheet.stop_if_wrong()
    sheet.verify(
        PROMPT,
        laws.overlap_law(evidence, own.buckets(), reference.evidence.step_ns),
    )
