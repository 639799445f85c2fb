"""The compiler's benchmark, rehearsed on the CPU as its command runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from overlaplab.bench import command
from tests.ranks import run_here


def test_a_rehearsal_checks_every_way_and_keeps_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "compiler.json"
    arguments = "compiler --backend gloo --world-size 2 --model tiny --batches 1"
    arguments += " --batches 2 --out"
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split(), str(out)])
    monkeypatch.setattr(command, "run_ranks", run_here)

    assert command.main() == 0

    first, second = json.loads(out.read_text())["cases"]
    check_case(first)
    check_case(second)  # without what was compiled for the first


def check_case(case: dict[str, Any]) -> None:
    ways = case["variants"]
    assert list(ways) == [
        *("compute", "serial", "ddp 100 views static", "our reducer", "ours"),
        "ours, rows",
    ]
    assert case["gradient_norm"] > 0
    assert ways["ddp 100 views static"]["ratio_to_best_peer"] == 1
    assert ways["ours"]["num_messages"] == 1
    # Float32 gradients of all parameters.
    assert ways["ours"]["messages_mib"] == [round(case["num_parameters"] / 2**18, 1)]
    assert ways["ours"]["predicted_ms"] > 0
    # The rows, which words they are, and all other gradients.
    assert ways["ours, rows"]["num_messages"] == 3
    assert ways["ours, rows"]["settings"]["embedding_rows"] == 8 * case["batch"]
    assert "predicted_ms" not in ways["serial"]
