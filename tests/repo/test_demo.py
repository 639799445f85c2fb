"""The demonstration: what it prints holds, and it would notice wrong parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from overlaplab import cli, demo
from overlaplab.techniques.data_parallel import SerialReducer


@pytest.fixture(scope="module")
def variants() -> dict[str, demo.Variant]:
    """The demo's default run, at two ranks and two steps."""
    return {
        name: demo.run_variant(make, "virtual", 2, 2, demo.DEMO_HARDWARE)
        for name, make in demo.VARIANTS.items()
    }


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return demo.train_alone(2, 2, demo.SMALL, torch.device("cpu"))


def test_every_variant_ends_with_the_parameters_of_one_process(
    variants: dict[str, demo.Variant], expected: Tensor
) -> None:
    assert demo.compare(variants, expected) == []


def test_a_parameter_of_one_rank_that_is_off_is_noticed(
    variants: dict[str, demo.Variant], expected: Tensor
) -> None:
    serial = variants["serial"]
    off = serial.parameters[1].clone()
    off[7] += 2 * demo.TOLERANCE
    changed = demo.Variant(serial.step, (serial.parameters[0], off))

    assert demo.compare({"serial": changed}, expected) == [
        "serial: rank 1 and rank 0 have other parameters"
    ]


class _SumsInsteadOfAveraging(SerialReducer):
    def wait(self) -> None:
        super().wait()
        for parameter in self.model_parameters:
            parameter.grad.mul_(2)  # type: ignore[union-attr]

    def __init__(self, model: nn.Module, sizes: demo.Sizes) -> None:
        super().__init__(model)
        self.model_parameters = list(model.parameters())


def test_a_reducer_that_forgets_the_mean_is_noticed(expected: Tensor) -> None:
    wrong = demo.run_variant(
        _SumsInsteadOfAveraging, "virtual", 2, 2, demo.DEMO_HARDWARE
    )

    (problem,) = demo.compare({"sum": wrong}, expected)
    assert problem.startswith("sum: a parameter is")


def test_the_default_sizes_show_what_the_demo_is_for(
    variants: dict[str, demo.Variant],
) -> None:
    reports = {name: variant.step.report() for name, variant in variants.items()}

    assert reports["serial"].hidden_ns == 0
    assert reports["bucketed"].step_ns < 0.9 * reports["serial"].step_ns
    assert reports["bucketed"].step_ns < reports["per parameter"].step_ns
    for variant in variants.values():
        assert sum(variant.step.critical_path().shares_ns.values()) == (
            variant.step.report().step_ns
        )


@pytest.mark.parametrize(
    "cluster", ["virtual", "gloo", pytest.param("nccl", marks=pytest.mark.gpu(2))]
)
def test_the_command_prints_the_table_and_saves_the_figure(
    tmp_path: Path, cluster: str
) -> None:
    out = tmp_path / "demo.png"
    arguments = ["--cluster", cluster, "--ranks", "2", "--steps", "2"]

    result = CliRunner().invoke(cli.main, ["demo", *arguments, "--out", str(out)])

    assert result.exit_code == 0, result.output
    for fact in ("serial", "per parameter", "bucketed", "step (", "latency %"):
        assert fact in result.stdout
    assert "All 3 variants end with the same parameters" in result.stdout
    assert ("Measured:" in result.stdout) == (cluster != "virtual")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_batches_differ_between_ranks_and_steps() -> None:
    first = demo.batch(0, 1, demo.SMALL)[0]
    assert not torch.equal(first, demo.batch(1, 1, demo.SMALL)[0])
    assert not torch.equal(first, demo.batch(0, 2, demo.SMALL)[0])
