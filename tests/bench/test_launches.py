"""What is launched for modules and optimizers: a rehearsal on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlaplab.bench.command import benchmarks
from overlaplab.bench.launches.cases import SMALL, Case
from overlaplab.bench.launches.measure import Saved, distinct_bytes


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("launches") / "out.json"
    choice = ["--module", "layer_norm", "--optimizer", "SGD with momentum"]
    command = ["launches", "--backend", "gloo", "--out", str(out), *choice]
    benchmarks.main(command, standalone_mode=False)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_rehearsal_counts_operators_and_what_is_saved(
    rehearsed: dict[str, Any],
) -> None:
    (facts,) = rehearsed["modules"].values()
    rows = SMALL.batch * SMALL.tokens
    activation, row = 4 * rows * SMALL.width, 4 * SMALL.width
    statistics = 4 * rows
    assert facts["forward"]["operators"] == [
        [
            "native_layer_norm.default",
            [f"{activation} x 1", f"{row} x 2"],
            [f"{activation} x 1", f"{statistics} x 2"],
            1,
        ]
    ]
    assert facts["saved_bytes"] == 2 * statistics  # the input is the caller's
    names = [name for name, *_ in facts["backward"]["kernels"]]
    assert names == ["native_layer_norm_backward"]
    assert facts["both"]["gpu_us"] > 0


def test_an_optimizer_is_measured_once_its_states_are_made(
    rehearsed: dict[str, Any],
) -> None:
    (facts,) = rehearsed["optimizers"].values()
    matrix = 4 * SMALL.matrix**2
    assert facts["step"]["operators"] == [
        ["mul_.Tensor", [f"{matrix} x 1"], [f"{matrix} x 1"], SMALL.matrices],
        ["add_.Tensor", [f"{matrix} x 2"], [f"{matrix} x 1"], 2 * SMALL.matrices],
    ]


def test_an_expanded_tensor_takes_the_memory_of_what_it_repeats() -> None:
    assert distinct_bytes(torch.zeros(3, 1).expand(3, 5)) == 12
    assert distinct_bytes(torch.zeros(3, 5).t()) == 60
    assert distinct_bytes(torch.zeros(0, 5)) == 0


def test_two_views_of_one_storage_are_saved_once() -> None:
    x = torch.ones(4, requires_grad=True)

    def twice(x: torch.Tensor) -> torch.Tensor:
        grown = x.exp()
        return grown[:2] * grown[2:]

    saved = Saved(Case(twice, (x,)))
    with saved:
        twice(x)
    assert saved.rows() == [[[2], "float32", 16]]


def test_parameters_and_inputs_are_not_kept_for_the_backward() -> None:
    case = Case(nn.Linear(3, 3), (torch.ones(2, 3, requires_grad=True),))
    saved = Saved(case)
    with saved:
        case.call(*case.inputs)
    assert saved.rows() == []
