"""What is launched for modules and optimizers: rehearsed, and beside CUDA's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlaplab.bench.command import benchmarks
from overlaplab.bench.launches.cases import GPU, SMALL, Case
from overlaplab.bench.launches.measure import Saved
from overlaplab.bench.launches.parity import (
    DEVIATIONS,
    STORED,
    Recorded,
    of_cuda,
    record_cases,
    table,
)
from overlaplab.hardware import find_hardware
from overlaplab.operators.launches import multi_tensor_launches


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


# What CUDA launched (one profiled run on an H200), beside the virtual cluster.

README = STORED.with_name("README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text())
    return found


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record_cases(GPU)


def test_kernels_bytes_and_what_is_saved_are_cudas_but_for_named_deviations(
    measured: dict[str, Any], recorded: Recorded
) -> None:
    cuda, ours = of_cuda(measured), recorded.counts()
    assert list(cuda) == list(ours)
    found: dict[str, dict[str, int]] = {}
    for phase, counts in cuda.items():
        for column, its in counts.items():
            if ours[phase][column] != its:
                found.setdefault(phase, {})[column] = ours[phase][column] - its
    named = {
        phase: {column: n for column, n in of.items() if column != "why"}
        for phase, of in DEVIATIONS.items()
    }
    assert found == named
    assert all(len(of["why"]) > 20 for of in DEVIATIONS.values())


def test_the_page_has_the_table_of_the_stored_run_and_of_this_code(
    measured: dict[str, Any], recorded: Recorded
) -> None:
    assert table(of_cuda(measured), recorded.counts()) in README


@pytest.mark.parametrize("name", ["llama block", "gpt block with dropout"])
def test_a_block_alone_takes_its_measured_time_within_5_percent(
    name: str, measured: dict[str, Any], recorded: Recorded
) -> None:
    times_us = recorded.times_us(find_hardware("h200-nvlink"))
    forward_us, backward_us = (
        times_us[f"{name}, {way}"] for way in ("forward", "backward")
    )
    facts = measured["modules"][name]  # of many in a row, as in training
    assert forward_us == pytest.approx(facts["forward"]["gpu_us"], rel=0.05)
    assert forward_us + backward_us == pytest.approx(facts["both"]["gpu_us"], rel=0.05)


@pytest.mark.parametrize("name", ["SGD", "AdamW, fused", "clip_grad_norm_ and Adam"])
def test_an_optimizers_kernels_take_their_measured_time_within_5_percent(
    name: str, measured: dict[str, Any], recorded: Recorded
) -> None:
    found_us = recorded.times_us(find_hardware("h200-nvlink"))[name]
    kernels_us = measured["optimizers"][name]["step"]["kernel_us"]
    assert found_us == pytest.approx(kernels_us, rel=0.05)


def test_a_launch_of_lists_has_so_many_blocks_and_so_many_tensors() -> None:
    chunk = 65_536
    assert multi_tensor_launches([chunk] * 320, 5) == 11  # 30 tensors each
    assert multi_tensor_launches([chunk * 320] * 2, 5) == 2
    assert multi_tensor_launches([chunk * 321], 1) == 2
    assert multi_tensor_launches([1] * 110, 1) == 1
    assert multi_tensor_launches([1] * 111, 1) == 2
    assert multi_tensor_launches([0, 0], 1) == 0
