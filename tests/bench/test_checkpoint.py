"""The benchmark of checkpoint plans, rehearsed on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from overlaplab.bench.command import benchmarks


def test_a_rehearsal_writes_peers_and_plans_with_what_was_predicted(
    tmp_path: Path,
) -> None:
    out = tmp_path / "checkpoint.json"
    command = ["checkpoint", "--backend", "gloo", "--case", "gpt", "--menu", "eager"]
    result = CliRunner().invoke(benchmarks, [*command, "--out", str(out)])
    assert result.exit_code == 0, result.output
    (case,) = json.loads(out.read_text())["cases"]
    assert case["not_measured"] == {} and case["rounds"] == 1
    rows = case["variants"]
    peers = {"eager, none", "eager, every 1", "eager, every 2", "eager, keep attention"}
    assert {name for name, row in rows.items() if row["is_peer"]} == peers
    ours = [row for row in rows.values() if not row["is_peer"]]
    assert ours and all(
        row["predicted_peak_bytes"] <= row["budget_bytes"] for row in ours
    )
    assert len({row["gradient_norm"] for row in rows.values()}) == 1  # bit-equal


def test_a_case_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(benchmarks, ["checkpoint", "--case", "bert"])
    assert result.exit_code == 2 and "'bert' is not one of" in result.output


@pytest.mark.parametrize("technique", ["reducer", "zero3"])
def test_two_ranks_rehearse_both_plans_with_what_was_predicted(
    tmp_path: Path, technique: str
) -> None:
    out = tmp_path / "checkpoint.json"
    command = ["checkpoint", "--backend", "gloo", "--world-size", "2"]
    command += ["--technique", technique]
    result = CliRunner().invoke(benchmarks, [*command, "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    (case,) = found["cases"]
    assert found["world_size"] == 2 and case["rounds"] == 1
    assert case["technique"] == technique
    rows = case["variants"]
    assert {"none", "least recompute, 0.5", "every block"} <= rows.keys()
    for row in rows.values():
        assert row["predicted_ms"] >= row["predicted_compute_ms"] > 0
        assert row["budget_bytes"] is None or (
            row["predicted_peak_bytes"] <= row["budget_bytes"]
        )
