"""Small models and steps on which learners' reducers run, with their oracle.

Each rank has data and an initial seed of its own, so that a missing broadcast shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from overlaplab.grading.evidence import Evidence


class Reducer(Protocol):
    """What a learner's reducer must offer."""

    def wait(self) -> None: ...


MakeReducer = Callable[[torch.nn.Module], Reducer]


@dataclass(frozen=True, slots=True)
class Fixture:
    """A model, its data and how it is trained.

    Args:
        name: "tied", "frozen", ...
        build: seed -> model; a module-level function (it is copied per rank).
        batch: (rank, step) -> tensors of that rank's batch, step from 1.
        loss: (model, batch, rank) -> scalar; a mean over the batch.
        same_seed: ranks build the same weights (else rank 0's must be broadcast).
        set_to_none: as in `zero_grad`.
    """

    name: str
    build: Callable[[int], torch.nn.Module]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]
    same_seed: bool = False
    set_to_none: bool = True


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out of `train`.

    Args:
        run: the `ol.Run`.
        gradients: `[rank][step - 1][name]` after `wait()`, None where there is none.
        parameters: `[rank][name]` after the last step.
        live_bytes: `[rank][step - 1]` bytes alive at the end of each step.
        evidence: of the run.
    """

    run: Any
    gradients: tuple[tuple[Mapping[str, torch.Tensor | None], ...], ...]
    parameters: tuple[Mapping[str, torch.Tensor], ...]
    live_bytes: tuple[tuple[int, ...], ...]
    evidence: Evidence


def clean_fixture() -> Fixture:
    """Eight equal layers, time enough to hide every bucket: for the prompt law."""
    raise NotImplementedError


def adversarial_fixtures() -> tuple[Fixture, ...]:
    """tied, frozen, unused, uneven, zero_element, mixed_dtype, over_size, in_place."""
    raise NotImplementedError


def train(
    fixture: Fixture,
    make_reducer: MakeReducer,
    *,
    steps: int = 3,
    world_size: int = 2,
    hardware: Any = "chalk",
    timeout_s: float = 30.0,
) -> Trained:
    """Train `steps` steps on the virtual cluster with the learner's reducer.

    `make_reducer(model)` is called once on each rank, after the harness's own hooks.
    """
    raise NotImplementedError


def oracle(
    fixture: Fixture, *, steps: int = 3, world_size: int = 2
) -> tuple[tuple[Mapping[str, torch.Tensor | None], ...], Mapping[str, torch.Tensor]]:
    """One process on the concatenated batch: (gradients by step, final parameters)."""
    raise NotImplementedError
