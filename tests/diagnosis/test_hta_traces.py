"""The report of six public traces: it never fails, and its numbers are exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import overlaplab as ol
from overlaplab import cli
from overlaplab.diagnosis.text import text

FOLDER = Path(__file__).parents[1] / "traces" / "hta"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
GPU_TRACES = [
    name
    for name, exact in EXPECTED.items()
    if name.endswith(".gz") and exact["n_gpu_events"]
]


def us(time_ns: int | None) -> float:
    return 0.0 if time_ns is None else time_ns / 1000


@pytest.mark.parametrize("name", GPU_TRACES)
def test_the_reports_numbers_are_the_exact_ones(name: str):
    found = ol.diagnose(ol.read_trace(FOLDER / name))
    record, expected = json.loads(json.dumps(found.to_dict())), EXPECTED[name]
    (whole,), full = record["whole"], expected["full_trace"]
    assert whole["rank"] == expected["distributed_rank"]
    assert us(whole["compute_ns"]) == pytest.approx(full["comp_union_us"], rel=1e-4)
    assert us(whole["communication_ns"]) == pytest.approx(full["comm_union_us"], 1e-4)
    assert us(whole["hidden_ns"]) == pytest.approx(full["overlap_us"], rel=1e-4)
    fraction = full["overlap_fraction_of_comm"]
    assert (whole["overlap_fraction"] is None) == (fraction is None)
    steps = {f"ProfilerStep#{step['step']}": step for step in record["steps"]}
    by_launch = expected["per_step_by_launch"]
    assert set(steps) == {k for k, v in by_launch.items() if v["comp_us"]}
    for number, step in steps.items():
        exact = by_launch[number]
        assert us(step["compute_ns"]) == pytest.approx(exact["comp_us"], rel=1e-4)
        assert us(step["communication_ns"]) == pytest.approx(exact["comm_us"], 1e-4)
        assert us(step["hidden_ns"]) == pytest.approx(exact["overlap_us"], rel=1e-4)
        assert sum(step["parts"].values()) == step["step_ns"]
    said = text(found, details=True)
    assert max(map(len, said.splitlines())) <= 104
    assert "%" not in said


def test_a_trace_without_gpu_events_says_so_and_finds_nothing_about_a_gpu():
    found = ol.diagnose(ol.read_trace(FOLDER / "hta_cpu_only.json.gz"))
    assert found.findings == ()
    assert not found.has_communication
    assert any("no GPU events" in remark for remark in found.remarks)


def test_the_command_says_that_a_trace_without_gpu_events_has_no_communication():
    path = str(FOLDER / "hta_cpu_only.json.gz")
    result = CliRunner().invoke(cli.main, ["report", path])
    assert result.exit_code == 3
    assert "no communication kernels found" in result.output
    assert "no number here is about a GPU" in result.output
