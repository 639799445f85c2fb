"""Plans hold their budgets, change no value, and leave models as they were."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.hardware import find_hardware
from overlaplab.techniques.memory import (
    BudgetError,
    CheckpointPlan,
    Costs,
    measure_costs,
    plan_checkpoints,
)
from overlaplab.techniques.memory.meters import PredictedMeter
from tests.techniques.memory.programs import (
    MODELS,
    WIDTH,
    DroppingBlock,
    MlpBlock,
    Net,
    dropping,
    gradients,
    mixed,
    two_steps,
)


@functools.cache
def _costs(name: str) -> Costs:
    """Of one of the models, taken once."""
    model, inputs = MODELS[name]()
    return measure_costs(model, inputs, hardware="chalk")


def _peak_on_virtual(name: str, plan: CheckpointPlan) -> int:
    run = ol.run(two_steps, name, plan, world_size=1, hardware="chalk", check=False)
    (memory,) = run.timeline.memory
    return max(num_bytes for _, num_bytes in memory.steps)


@pytest.mark.parametrize("name", MODELS)
def test_the_virtual_cluster_finds_no_more_than_the_plan_says(name: str) -> None:
    costs = _costs(name)
    plans = costs.frontier()
    for plan in (plans[0], plans[len(plans) // 2], plans[-1], costs.every(2)):
        found = _peak_on_virtual(name, plan)
        assert found <= plan.peak_bytes
        # A boundary that its reader gives back early counts to the reader's end.
        assert plan.peak_bytes <= 1.06 * found


@pytest.mark.parametrize("name", ["transformer", "fused on cuda"])
def test_a_transformers_peak_is_predicted_to_the_byte(name: str) -> None:
    costs = _costs(name)
    for plan in (costs.none(), costs.every(1), costs.every(1, "keep attention")):
        assert plan.peak_bytes == _peak_on_virtual(name, plan)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_buffers_and_random_state_are_bit_equal(name: str) -> None:
    (model, inputs), costs = MODELS[name](), _costs(name)
    expected = gradients(copy.deepcopy(model), inputs)
    for plan in {p.choice: p for p in (costs.frontier()[-1], costs.every(1))}.values():
        other = copy.deepcopy(model)
        with plan.apply(other):
            found = gradients(other, inputs)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_apply_and_undo_leave_the_model_as_it_was() -> None:
    model, _ = dropping()
    before = [dict(vars(m)) for m in model.modules()]
    names = list(model.state_dict())
    applied = _costs("dropping").every(1).apply(model)
    assert list(model.state_dict()) == names
    assert "forward" in vars(model.blocks[0])
    with pytest.raises(ValueError, match=r"blocks\.0 has a forward of its own already"):
        _costs("dropping").every(1).apply(model)
    applied.undo()
    applied.undo()
    assert [dict(vars(m)) for m in model.modules()] == before


def test_planning_changes_nothing() -> None:
    model, inputs = mixed()
    inputs[0].requires_grad_()
    values = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    measure_costs(model, inputs, hardware="chalk")
    measure_costs(model, inputs, hardware="measured")
    assert torch.equal(torch.rand(1), expected)
    assert all(p.grad is None for p in (*model.parameters(), *inputs))
    assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())


def test_a_plan_says_what_it_keeps_and_who_holds_the_peak() -> None:
    plan = _costs("dropping").every(2)
    text = str(plan)
    assert "blocks.0: recompute" in text and "blocks.1: keep" in text
    assert "predicted: peak" in text and "resident" in text
    assert sum(n for _, n in plan.chain.holders(plan.choice)[1]) == plan.peak_bytes


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    model, inputs = dropping()
    with pytest.raises(BudgetError, match="budget_bytes is 1,000") as caught:
        plan_checkpoints(model, inputs, budget_bytes=1000, hardware="chalk")
    least = caught.value.least_bytes
    given = {"budget_bytes": least, "costs": _costs("dropping")}
    plan = plan_checkpoints(model, inputs, **given)
    assert plan.peak_bytes == least
    with pytest.raises(BudgetError):
        _costs("dropping").fastest(least - 1)


def test_what_else_lives_counts() -> None:
    model, inputs = dropping()
    alone = _costs("dropping").none().peak_bytes
    more = measure_costs(model, inputs, hardware="chalk", resident_bytes=1000)
    assert more.none().peak_bytes == alone + 1000


def test_a_block_that_is_called_twice_is_kept_and_named() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.blocks[1](x))

    model = Twice(*(DroppingBlock() for _ in range(3)))
    costs = measure_costs(model, (torch.randn(8, WIDTH),), hardware="chalk")
    assert [block.name for block in costs.chain.blocks] == ["blocks.0", "blocks.2"]
    assert costs.chain.notes == ("blocks.1 kept: it is called 2 times in a step",)


def test_a_block_that_writes_its_input_is_kept_and_named() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x.add_(1)) * 2

    model = Net(DroppingBlock(), Writes(), DroppingBlock())
    costs = measure_costs(model, (torch.randn(8, WIDTH),), hardware="chalk")
    assert costs.chain.notes == ("blocks.1 kept: it writes one of its inputs",)


def test_a_block_that_counts_its_forwards_has_no_recomputation() -> None:
    class Counts(DroppingBlock):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return super().forward(x)

    model = Net(DroppingBlock(), Counts())
    costs = measure_costs(model, (torch.randn(8, WIDTH),), hardware="chalk")
    assert [o.policy for o in costs.chain.blocks[1].options] == ["keep"]
    assert costs.chain.notes == (
        "blocks.1 kept: its forward changes the buffer seen, so it runs once",
    )


def test_a_branch_on_values_is_measured_or_refused() -> None:
    class Branches(DroppingBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    model = Net(Branches(), Branches())
    inputs = (torch.randn(8, WIDTH),)
    with pytest.raises(
        ValueError, match=r'Net looks at the values .* hardware="measured"'
    ):
        measure_costs(model, inputs, hardware="chalk")
    plan = measure_costs(model, inputs, hardware="measured").every(1)
    expected = gradients(copy.deepcopy(model), inputs)
    with plan.apply(model):
        assert all(map(torch.equal, gradients(model, inputs), expected))


def test_autocast_around_the_step_is_planned_and_replayed() -> None:
    model, inputs = dropping()
    expected, found = [], []
    with torch.autocast("cpu", torch.bfloat16):
        costs = measure_costs(model, inputs, hardware="chalk")
    for grads, plan in ((expected, costs.none()), (found, costs.every(1))):
        with plan.apply(model):
            torch.manual_seed(3)
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*inputs)
            loss.backward()
            grads += [p.grad.clone() for p in model.parameters()]
    assert all(map(torch.equal, found, expected))
    kept = _costs("dropping").chain.blocks[1].options[0].kept_bytes
    assert costs.chain.blocks[1].options[0].kept_bytes != kept


def test_200_like_blocks_take_one_pass_and_one_copy_of_one_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net(*(DroppingBlock() for _ in range(200)))
    calls, copies = [], []
    forward, made = DroppingBlock.forward, DroppingBlock.__setstate__
    monkeypatch.setattr(
        DroppingBlock, "forward", lambda s, x: (calls.append(1), forward(s, x))[1]
    )
    monkeypatch.setattr(
        DroppingBlock, "__setstate__", lambda s, x: (copies.append(1), made(s, x))[1]
    )
    costs = measure_costs(model, (torch.randn(8, WIDTH),), hardware="chalk")
    assert len(costs.chain.blocks) == 200
    assert len({block.options for block in costs.chain.blocks}) <= 2
    # Two kinds: the first block's input needs no gradient.
    assert len(calls) < 50 and len(copies) == 2
    plans = costs.frontier()
    assert costs._curve.is_exact and len(plans) <= 402
    assert [p.peak_bytes for p in plans] == sorted({p.peak_bytes for p in plans})[::-1]


def test_blocks_that_are_not_planned_give_their_gradients_each_step() -> None:
    """Measured, with steps before the one that counts."""

    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.blocks[1](x))

    model = Twice(*(MlpBlock(64) for _ in range(3)))
    inputs = (torch.randn(8, WIDTH),)
    measured, predicted = (
        measure_costs(model, inputs, hardware=hardware).every(1)
        for hardware in ("measured", "chalk")
    )
    assert measured.peak_bytes == predicted.peak_bytes


def test_many_blocks_that_keep_little_need_less_when_they_are_nested() -> None:
    """As [Note: why a plan is per block] counts; plans of nested ones hold."""
    blocks = [MlpBlock(8) for _ in range(12)]
    inputs = (torch.randn(64, WIDTH),)
    least = {}
    for size in (1, 3, 12):
        rows = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        model = Net(*(nn.Sequential(*row) for row in rows))
        costs = measure_costs(model, inputs, hardware="chalk")
        assert len(costs.chain.blocks) == len(rows)
        least[size] = costs.frontier()[-1].peak_bytes
    assert least[3] < min(least[1], least[12])


def test_launches_are_those_of_the_step_and_named_where_they_bind() -> None:
    hw = replace(find_hardware("chalk"), launch_ns=1000, backward_launch_ns=10)
    model, inputs = dropping()
    plan = measure_costs(model, inputs, hardware=hw).none()
    run = ol.run(two_steps, "dropping", plan, world_size=1, hardware=hw, check=False)
    launches = [span for span in run.timeline.spans if span.kind == "launch"]
    making = [span.name in ("launch uniform_", "launch randn") for span in launches]
    total_ns = sum(
        s.duration_ns for s, m in zip(launches, making, strict=True) if not m
    )
    assert 2 * plan.launch_ns == total_ns
    assert plan.launch_ns > plan.step_ns
    assert f"they take the CPU up to {plan.launch_ns / 1e6:.3f} ms" in str(plan)
    assert "launches may bind" not in str(_costs("dropping").none())


def test_allocations_are_rounded_as_the_profile_says() -> None:
    meter = PredictedMeter(find_hardware("h200-nvlink"))
    assert [meter.rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert meter.workspace_bytes() == 32 * 2**20


def test_wrong_arguments_are_refused() -> None:
    model, inputs = dropping()
    with pytest.raises(ValueError, match="granularity is 'operator'"):
        measure_costs(model, inputs, hardware="chalk", granularity="operator")
    with pytest.raises(TypeError, match=r"budget_bytes is 1\.5"):
        plan_checkpoints(model, inputs, budget_bytes=1.5, hardware="chalk")
    with pytest.raises(ValueError, match=r"Linear has no nn\.ModuleList"):
        measure_costs(nn.Linear(2, 2), (torch.randn(2, 2),), hardware="chalk")
    with pytest.raises(ValueError, match=r"blocks\[1\] \(blocks\.0\.widen\) overlaps"):
        measure_costs(
            model,
            inputs,
            hardware="chalk",
            blocks=[model.blocks[0], model.blocks[0].widen],
        )
    with pytest.raises(ValueError, match="compiled blocks and models can only"):
        measure_costs(model, inputs, hardware="chalk", compile=True)
