"""Models and steps that planned checkpoints once got wrong, or answered in riddles."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlaplab.techniques.memory import (
    EAGER,
    Costs,
    frontier,
    measure_costs,
)
from tests.techniques.memory.programs import WIDTH, DroppingBlock, Net, gradients

INPUTS = torch.arange(8.0 * WIDTH).view(8, WIDTH) / 8 / WIDTH
RECOMPUTING = [policy.name for policy in EAGER[1:]]


def _net() -> Net:
    torch.manual_seed(0)
    return Net(*(DroppingBlock() for _ in range(3)))


@pytest.fixture(scope="module")
def costs() -> Costs:
    return measure_costs(_net(), INPUTS, hardware="chalk")


def test_a_graph_that_is_kept_goes_backward_twice(costs: Costs) -> None:
    model = _net()

    def twice() -> list[Any]:
        torch.manual_seed(0)
        loss = model(INPUTS)
        loss.backward(retain_graph=True)
        loss.backward()
        made = [p.grad for p in model.parameters()]
        model.zero_grad()
        return made

    expected = twice()
    with costs.every(1).apply(model):
        assert all(map(torch.equal, expected, twice()))


def test_gradients_of_gradients_are_bit_equal(costs: Costs) -> None:
    model = _net()

    def penalty() -> list[Any]:
        torch.manual_seed(0)
        inputs = INPUTS.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs), inputs, create_graph=True)
        slope.square().sum().backward()
        made = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return made

    expected = penalty()
    with costs.every(1).apply(model):
        found = penalty()
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_a_model_with_a_plan_may_be_compiled_whole(costs: Costs, policy: str) -> None:
    model = _net().eval()
    expected = gradients(model, (INPUTS,))
    with costs.every(1, policy).apply(model):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        found = gradients(compiled, (INPUTS,))
    assert len(found) == len(expected)
    assert all(map(torch.equal, expected, found))


def test_hooks_that_make_the_weights_belong_to_a_block() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).tanh()

    model = Net(Normed(), DroppingBlock())
    costs = measure_costs(model, INPUTS, hardware="chalk")
    assert [o.policy for o in costs.chain.blocks[0].options] == ["keep"]
    assert "blocks.0 kept: its forward changes the buffer" in costs.chain.notes[0]


def test_a_block_that_counts_in_an_attribute_runs_once() -> None:
    class Counts(DroppingBlock):
        calls = 0
        width: int | None = None

        def __init__(self, every_time: bool) -> None:
            super().__init__()
            self.every_time = every_time

        def forward(self, x: Tensor) -> Tensor:
            self.width = x.shape[-1]
            self.calls += self.every_time
            return super().forward(x) * (1 + self.calls)

    model = Net(Counts(every_time=True), Counts(every_time=False))
    chain = measure_costs(model, INPUTS, hardware="chalk").chain
    assert [len(block.options) for block in chain.blocks] == [1, len(EAGER)]
    assert chain.notes == (
        "blocks.0 kept: its forward changes the attribute calls, so it runs once",
    )


@dataclass
class Batch:
    """Torch does not look into it."""

    x: Tensor


class OfBatch(nn.Module):
    def __init__(self, unpacks: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.unpacks = unpacks

    def forward(self, batch: Batch) -> Any:
        made = self.inner(batch.x)
        return made if self.unpacks else Batch(made)


class Batches(Net):
    def forward(self, x: Tensor) -> Any:
        batch: Any = Batch(x)
        for block in self.blocks:
            batch = block(batch)
        return batch


def test_tensors_that_torch_does_not_see_are_named() -> None:
    message = r"takes or returns a Batch, .* no tensors: make it a tuple or a dict"
    with pytest.raises(ValueError, match=message):
        measure_costs(
            Batches(OfBatch(), OfBatch(unpacks=True)), INPUTS, hardware="chalk"
        )

    class Wraps(Net):
        def forward(self, x: Tensor) -> Any:
            return Batch(super().forward(x))

    with pytest.raises(ValueError, match="the model's output is a Batch, in which"):
        measure_costs(Wraps(DroppingBlock()), INPUTS, hardware="chalk")


def test_what_is_scripted_or_compiled_already_is_named() -> None:
    scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    model = Net(scripted, DroppingBlock())
    notes = measure_costs(model, INPUTS, hardware="chalk").chain.notes
    assert notes[0].startswith("blocks.0 kept: it is scripted")

    model = Net(torch.compile(DroppingBlock()), DroppingBlock())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"blocks\.0 is what torch\.compile returned"):
        measure_costs(model, INPUTS, hardware="chalk")
    with pytest.raises(ValueError, match=r"model is what torch\.compile returned"):
        measure_costs(torch.compile(_net()), INPUTS, hardware="chalk")  # type: ignore[arg-type]


def test_a_curve_and_a_plan_print_in_lines_that_are_read(costs: Costs) -> None:
    curve = frontier(_net(), INPUTS, hardware="chalk")
    lines = str(curve).splitlines()

    assert lines[0].split() == ["peak", "(MiB)", "step", "(ms)", "blocks"]
    assert lines[1].endswith("3 x keep")
    assert len(lines) == len(curve) + 1
    assert max(map(len, lines)) < 100
    assert "the peak is in the before" not in "".join(map(str, curve))
    assert repr(costs.every(2)).endswith("ms: 2 x recompute; 1 x keep)")
    assert copy.deepcopy(curve) == curve
    assert str(type(curve)((curve[0],) * 100)).endswith("24 of 100 plans")
