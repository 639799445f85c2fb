"""The benchmark of checkpoint plans, rehearsed on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from overlaplab.bench.checkpoint import command
from overlaplab.bench.checkpoint.ranks import REHEARSAL, measure_batch
from overlaplab.bench.command import benchmarks
from tests.ranks import run_here, values_of


def test_a_rehearsal_writes_peers_and_plans_with_what_was_predicted(
    tmp_path: Path,
) -> None:
    out = tmp_path / "checkpoint.json"
    asked = ["checkpoint", "--backend", "gloo", "--case", "gpt", "--menu", "eager"]
    result = CliRunner().invoke(benchmarks, [*asked, "--out", str(out)])
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


def looks_right(case: dict[str, Any]) -> None:
    rows = case["variants"]
    assert case["rounds"] == 1
    assert {"none", "least recompute, 0.5", "every block"} <= rows.keys()
    for row in rows.values():
        assert row["predicted_ms"] >= row["predicted_compute_ms"] > 0
        assert row["budget_bytes"] is None or (
            row["predicted_peak_bytes"] <= row["budget_bytes"]
        )


def test_two_ranks_rehearse_both_plans_with_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_ranks", run_here)
    out = tmp_path / "checkpoint.json"
    asked = ["checkpoint", "--backend", "gloo", "--world-size", "2"]
    result = CliRunner().invoke(
        benchmarks, [*asked, "--menu", "eager", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    (case,) = found["cases"]
    assert (found["world_size"], case["technique"]) == (2, "reducer")
    looks_right(case)


def test_two_ranks_rehearse_the_plans_of_a_sharded_model() -> None:
    plan = replace(REHEARSAL, technique="zero3")
    first, _ = values_of(
        measure_batch, "gpt", plan, plan.batches[0], "here", 1.0, cluster="gloo"
    )
    assert first["technique"] == "zero3"
    looks_right(first)
