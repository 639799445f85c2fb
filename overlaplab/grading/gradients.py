"""What a reducer must leave in `.grad`: compared with one process on the whole batch.

Shared by the labs that grade reducers. Runs no reducer, knows no exercise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from overlaplab.grading import fixtures, laws, program_laws
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.fixtures import Fixture, Gradients, Trained
from overlaplab.grading.violation import Violation
from overlaplab.models.toy_nets import MixedDtypes


def traps() -> list[Fixture]:
    """The adversarial fixtures; ranks start equal: no broadcast is asked for."""
    # No bfloat16: its rounding may hide a wrong value.
    dtypes = (torch.float32, torch.float64, torch.float32)
    equal = [replace(f, same_seed=True) for f in fixtures.adversarial_fixtures()]
    return [
        replace(f, make_model=partial(MixedDtypes, dtypes))
        if f.name == "mixed_dtypes"
        else f
        for f in equal
    ]


def wrong_gradients(
    trained: Trained, fixture: Fixture, num_ranks: int, *, steps: int = 3
) -> list[Violation]:
    """Violations of every step, first step first; then of where the values come from.

    Zeros will do where no rank used the parameter: whether they are None is left open.
    """
    right_ones, _ = fixtures.oracle(fixture, steps=steps, world_size=num_ranks)
    found = []
    for step in range(1, steps + 1):
        right = comparable(right_ones[step - 1])
        seen = [comparable(rank, right) for rank in trained.gradients[step - 1]]
        found += laws.values_law(seen, right, step=step)
    return found or laws.origin_law(trained.evidence.program, what="a gradient")


def hold(
    sheet: Sheet,
    trained: Trained,
    wrong: Sequence[Violation],
    once: Sequence[Violation] | None = None,
    **options: Any,
) -> bool:
    """`program_laws.hold` of a reducer on one net.

    Args:
        once: None: what `once_law` finds.
    """
    once = laws.once_law(trained.evidence) if once is None else once
    how: dict[str, Any] = {"wrong": wrong, "once": once, "what": "a gradient"}
    return program_laws.hold(sheet, trained.run, **how, **options)


def are_same(seen: Mapping[str, torch.Tensor | None], right: Gradients) -> bool:
    """Whether tensors are these, within the tolerance of float32."""
    right = comparable(right)
    return not laws.values_law([comparable(seen, right)], right)


def are_sums(seen: Gradients, fixture: Fixture, num_ranks: int) -> bool:
    """Whether gradients of step 1 are the sum over the ranks and not the mean."""
    right = fixtures.oracle(fixture, steps=1, world_size=num_ranks)[0][0]
    scaled = {n: None if g is None else g * num_ranks for n, g in right.items()}
    return are_same(seen, scaled)


def are_own(seen: Gradients, fixture: Fixture) -> bool:
    """Whether gradients of step 1 are rank 0's own, as if no message had come."""
    return are_same(seen, fixtures.oracle(fixture, steps=1, world_size=1)[0][0])


def comparable(
    grads: Mapping[str, torch.Tensor | None], right: Gradients | None = None
) -> Gradients:
    """In float32, the dtype of what most nets compute with.

    Args:
        right: where it has None, zeros become None.
    """

    def unused(name: str, grad: torch.Tensor) -> bool:
        return right is not None and right.get(name) is None and not bool(grad.any())

    return {
        name: None if grad is None or unused(name, grad) else grad.float()
        for name, grad in grads.items()
    }
