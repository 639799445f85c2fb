"""The whole model compiled as one more choice, beside plans of blocks."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from overlaplab.techniques.memory import (
    BudgetError,
    Communication,
    Costs,
    Whole,
    measure_costs,
)
from tests.guards import GUARD_S
from tests.techniques.memory.programs import dropping, gradients

BACKEND = "aot_eager"


@pytest.fixture(scope="module")
def blocks() -> Costs:
    model, inputs = dropping()
    return measure_costs(model, inputs, hardware="chalk")


def _with(costs: Costs, *wholes: tuple[int, int]) -> Costs:
    named = tuple(Whole(f"whole {i}", *row) for i, row in enumerate(wholes))
    return replace(costs, wholes=named)


def test_the_whole_is_chosen_where_it_fits_and_is_faster(blocks: Costs) -> None:
    fastest = blocks.none()
    peak, ns = fastest.peak_bytes + 1000, fastest.step_ns - 1
    costs = _with(blocks, (peak, ns), (peak + 1, ns + 2))
    assert costs.fastest(peak + 1).names == ("whole 0",)
    assert costs.fastest(peak + 1).peak_bytes == peak
    assert costs.fastest(peak - 1).choice == fastest.choice
    curve = [(plan.peak_bytes, plan.step_ns) for plan in costs.frontier()]
    assert curve[0] == (peak, ns) and (peak + 1, ns + 2) not in curve
    assert curve[1:] == [(p.peak_bytes, p.step_ns) for p in blocks.frontier()]


def test_the_least_budget_may_be_that_of_the_whole(blocks: Costs) -> None:
    least = blocks.frontier()[-1].peak_bytes - 10
    costs = _with(blocks, (least, 10**9))
    assert costs.fastest(least).names == ("whole 0",)
    with pytest.raises(BudgetError) as caught:
        costs.fastest(least - 1)
    assert caught.value.least_bytes == least


def test_gradients_of_the_whole_travel_when_its_backward_has_ended(
    blocks: Costs,
) -> None:
    sent = Communication(world_size=2, hardware="chalk")
    peak, ns = blocks.none().peak_bytes, blocks.none().step_ns - 1
    plan = _with(blocks, (peak, ns)).fastest(peak, sent)
    assert plan.whole is None  # it hides messages, which the whole cannot
    whole = _with(blocks, (peak, 1)).fastest(peak, sent)
    assert whole.step_ns == 1 + sum(sent.block_ns(blocks.chain))


def measure_apply_and_undo() -> None:
    model, inputs = dropping()
    costs = measure_costs(
        model, inputs, hardware="measured", whole_budgets=(1.0,), backend=BACKEND
    )
    (whole,) = costs.wholes
    assert whole.policy == "whole compiled 1" and whole.step_ns > 0
    # Nothing is fused here: it keeps what blocks keep, or less.
    resident = costs.chain.resident_bytes
    assert resident < whole.peak_bytes <= costs.none().peak_bytes
    plan = next(costs._plan((), whole=found) for found in costs.wholes)
    assert "all blocks: whole compiled 1" in str(plan)
    assert sum(n for _, n in plan.holders[1]) == plan.peak_bytes

    expected = gradients(copy.deepcopy(model), inputs)
    before = [dict(vars(module)) for module in model.modules()]
    with plan.apply(model) as applied:
        found = gradients(model, inputs)
        with pytest.raises(ValueError, match="forward of Net was replaced on this"):
            plan.apply(model)
    applied.undo()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert all(map(torch.equal, found, expected))


def test_a_compiled_whole_is_measured_applied_and_taken_back() -> None:
    """In a process of its own: after thousands of other tests masks once differed."""
    call = "from tests.techniques.memory import test_whole as t"
    ran = subprocess.run(
        [sys.executable, "-c", f"{call}; t.measure_apply_and_undo()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_what_takes_part_in_the_whole_is_known_before_it_is_run(blocks: Costs) -> None:
    model, inputs = dropping()
    with pytest.raises(ValueError, match="compiled blocks and models can only"):
        measure_costs(model, inputs, hardware="chalk", whole_budgets=(1.0,))
    with pytest.raises(TypeError, match=r"whole_budgets is 1\.0; expected several"):
        measure_costs(model, inputs, hardware="measured", whole_budgets=1.0)  # type: ignore[arg-type]
