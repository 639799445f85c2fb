"""Odd models and wrong arguments: what is said, and that nothing is left behind."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overlaplab.techniques.memory import (
    EAGER,
    Communication,
    Costs,
    compiled,
    measure_costs,
    plan_checkpoints,
    policies,
)
from overlaplab.techniques.memory.policies import Policy
from tests.techniques.memory.programs import transformer


class Net(nn.Module):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or (nn.Linear(4, 4), nn.Linear(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        return x.square().mean()


INPUTS = torch.arange(12.0).view(3, 4)


@pytest.fixture(scope="module")
def costs() -> Costs:
    return measure_costs(Net(), INPUTS, hardware="chalk")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resident_bytes": float("nan")}, "resident_bytes is nan; expected a whole"),
        ({"resident_bytes": 2**70}, f"resident_bytes is {2**70}; expected 0 to"),
        ({"resident_bytes": {"a": None}}, r"resident_bytes\['a'\] is None; expected"),
        ({"resident_bytes": -1}, "resident_bytes is -1; expected 0 to"),
        ({"hardware": 5}, "hardware is 5; expected the name of a profile"),
        ({"policies": ["keep"]}, r"policies\[0\] is 'keep'; expected a Policy"),
        ({"policies": "keep"}, "policies is 'keep'; expected a list of Policy"),
        ({"policies": [*EAGER, Policy("keep")]}, "two of the name 'keep'"),
        ({"loss": 5}, "loss is 5; expected a function"),
        ({"compiled_parts": "head"}, r"expected a list: \['head'\]"),
        ({"compiled_parts": ["hed"]}, "names 'hed', and Net has no method"),
        ({"blocks": nn.Linear(4, 4)}, "blocks is a Linear; expected a list"),
        ({"blocks": ["blocks.0"]}, r"blocks\[0\] is 'blocks.0'; expected a module"),
        (
            {"compile": True, "hardware": "measured", "compile_budgets": [np.nan]},
            r"compile_budgets\[0\] is nan; expected a number from 0 to 1",
        ),
    ],
)
def test_a_wrong_argument_is_named(settings: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        measure_costs(Net(), INPUTS, **{"hardware": "chalk", **settings})


class Scaled(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale)


@pytest.mark.parametrize("hardware", ["chalk", "measured"])
@pytest.mark.parametrize(
    ("inputs", "facts"),
    [
        (None, "None. TypeError: "),
        ((), "none. TypeError: .* missing 1 required"),
        (
            (INPUTS, 1.0, 2),
            r"float32 \(3, 4\) on cpu, 1.0, 2. TypeError: .* but 4 were",
        ),
        ({"y": INPUTS}, r"y=float32 \(3, 4\) on cpu. .* keyword argument 'y'"),
        (INPUTS[:, :3], r"float32 \(3, 3\) on cpu. RuntimeError: "),
        (INPUTS.double(), r"float64 \(3, 4\) on cpu. \w+Error: .*dtype"),
        (INPUTS.numpy(), "a ndarray. "),
        (iter([INPUTS]), "a list_iterator. TypeError: "),
    ],
)
def test_sample_inputs_that_do_not_fit_are_named_with_what_is_expected(
    inputs: Any, facts: str, hardware: str
) -> None:
    expected = r"(?s)Scaled cannot be run with .*Expected what Scaled\.forward\(x: .* "
    expected += "takes: one value, a tuple of arguments or a dict"
    with pytest.raises(ValueError, match=expected) as caught:
        measure_costs(Scaled(), inputs, hardware=hardware)
    assert re.search(f"sample_inputs: {facts}", str(caught.value)), caught.value
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out.logits, r"loss cannot take .*, float32 \(\) on cpu. Attr"),
        (lambda out: out.detach(), "what loss returns has no gradient"),
    ],
)
def test_a_loss_that_does_not_fit_is_named(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_costs(Net(), INPUTS, hardware="chalk", loss=loss)


def test_a_compiler_that_is_not_there_is_named_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match=r"backend is 'nope'; expected .*inductor"):
        measure_costs(Net(), INPUTS, hardware="measured", compile=True, backend="nope")


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (5, INPUTS, "model is a int; expected a torch.nn.Module"),
        (Net, INPUTS, "model is the class Net and not an object of it"),
        (Net(nn.LazyLinear(4)), INPUTS, r"size of blocks\.0\.weight yet: it is lazy"),
    ],
)
def test_what_is_no_model_yet_is_refused(model: Any, inputs: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        measure_costs(model, inputs, hardware="chalk")


def test_nothing_is_measured_on_meta_and_all_is_planned() -> None:
    model, inputs = Net().to("meta"), INPUTS.to("meta")
    with pytest.raises(ValueError, match="the model is on meta, where nothing runs"):
        measure_costs(model, inputs, hardware="measured")

    with pytest.raises(ValueError, match=r"sample_inputs: float32 \(3, 4\) on meta"):
        measure_costs(Net(), inputs, hardware="measured")

    model, batch = transformer()  # its attention is a kernel, and none on meta
    on_cpu = measure_costs(model, batch, hardware="chalk")
    batch = tuple(tensor.to("meta") for tensor in batch)
    on_meta = measure_costs(model.to("meta"), batch, hardware="chalk")
    assert on_meta.chain == on_cpu.chain


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), "1", None, True])
def test_a_budget_that_is_no_number_of_bytes_is_refused(
    costs: Costs, budget: Any
) -> None:
    for ask in (
        lambda: plan_checkpoints(Net(), INPUTS, budget_bytes=budget, costs=costs),
        lambda: costs.fastest(budget),
    ):
        with pytest.raises(TypeError, match=r"budget_bytes is .*; expected a whole"):
            ask()


def test_a_budget_may_be_numpys_or_larger_than_any_memory(costs: Costs) -> None:
    assert costs.fastest(np.int64(2**40)).choice == costs.none().choice
    assert "of 1,099,511,627,776.0 MiB" in str(costs.fastest(10**400))


def test_a_choice_has_one_place_for_each_block(costs: Costs) -> None:
    for choice in ((0,), (0, 9), (0, -1)):
        with pytest.raises(ValueError, match="expected 2 places, one for each block"):
            costs.plan(choice)
    with pytest.raises(TypeError, match=r"k is 1\.5; expected a whole number"):
        costs.every(1.5)  # type: ignore[arg-type]


def test_communication_is_one_and_its_operations_are_several(costs: Costs) -> None:
    with pytest.raises(TypeError, match="communication is 'chalk'; expected a Comm"):
        costs.fastest(2**30, "chalk")  # type: ignore[arg-type]
    sent = Communication(world_size=2, hardware="chalk", operations="all_reduce")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected several: \('all_reduce',\)"):
        costs.fastest(2**30, sent)


class Rows(nn.Module):
    """Takes a number, no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, number: int) -> Tensor:
        return self.table[:number].exp()


class Odd(Net):
    """A block that takes no tensor, and one that the loss may not depend on."""

    def __init__(self, uses_all: bool) -> None:
        super().__init__(Rows(), nn.Linear(4, 4), nn.Linear(4, 4))
        self.uses_all = uses_all

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](3)
        other = self.blocks[1](x + first)
        return self.head(self.blocks[2](other if self.uses_all else x + first))


def test_a_block_may_take_no_tensor() -> None:
    plan = measure_costs(Odd(uses_all=True), INPUTS, hardware="chalk").every(1)

    assert [block.name for block in plan.chain.blocks] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


def test_a_block_that_the_loss_does_not_need_is_named() -> None:
    with pytest.raises(ValueError, match=r"never comes to blocks\.1: the loss does"):
        measure_costs(Odd(uses_all=False), INPUTS, hardware="chalk")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compiled_parts": ("hed",)}, "Net has no method of that name"),
        ({"compiled_parts": ("head",), "backend": "abacus"}, "abacus"),
    ],
)
def test_a_plan_that_cannot_be_applied_changes_nothing(
    costs: Costs, settings: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: Any, *, backend: str, dynamic: bool) -> Any:
        raise RuntimeError(f"no backend {backend}")

    monkeypatch.setattr(torch, "compile", refuse)
    model = Net()
    before = [dict(vars(module)) for module in model.modules()]

    with pytest.raises(Exception, match=message):
        replace(costs.every(1), **settings).apply(model)

    assert [dict(vars(module)) for module in model.modules()] == before
    with pytest.raises(TypeError, match="model is a str"):
        costs.every(1).apply("model")  # type: ignore[arg-type]


def test_a_copy_of_a_model_runs_its_own_blocks(
    costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A function, as torch.compile gives: copies of what holds it share it.
    monkeypatch.setattr(torch, "compile", lambda code, **_: lambda *args: code(*args))
    monkeypatch.setattr(policies, "_backend", lambda name, budget: name)
    menu = compiled((1.0,), "eager")
    chain = replace(
        costs.chain,
        blocks=tuple(
            replace(b, options=(replace(b.options[0], policy="compiled 1"),))
            for b in costs.chain.blocks
        ),
    )
    parts = {"compiled_parts": ("head",), "backend": "eager"}
    model = Net()
    with replace(Costs(chain, menu).none(), **parts).apply(model):  # type: ignore[arg-type]
        copied = copy.deepcopy(model)
        right = model(INPUTS).item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

        assert copied(INPUTS).item() == right != 0
