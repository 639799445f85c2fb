"""Whole steps of the compiler's benchmark, rehearsed on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from overlaplab.bench import command, whole_steps
from overlaplab.bench.compiled import REHEARSAL
from overlaplab.bench.workload import build
from tests.ranks import run_here, values_of


def test_a_rehearsal_trains_in_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "whole.json"
    arguments = "compiler --whole-steps --backend gloo --world-size 2 --model tiny"
    arguments += " --batches 1 --out"
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split(), str(out)])
    monkeypatch.setattr(command, "run_ranks", run_here)

    assert command.main() == 0

    (case,) = json.loads(out.read_text())["cases"]
    ways = case["variants"]
    assert list(ways) == [
        *("compute and update", "ddp, then AdamW"),
        *("our reducer, then AdamW", "ours, one graph"),
    ]
    assert ways["ddp, then AdamW"]["ratio_to_best_peer"] == 1
    assert ways["compute and update"]["exposed_ms"] == 0
    assert ways["ours, one graph"]["num_messages"] >= 1
    assert ways["ours, one graph"]["predicted_ms"] > 0
    assert all(way["first_step_s"] > 0 for way in ways.values())


def checks_after_a_step(averages: bool) -> str:
    """What is said of a way that trains each rank by itself, or not."""
    start, batch, _ = build("tiny", 1, REHEARSAL.tokens)
    trained = []
    for way in (
        whole_steps.ddp,
        whole_steps.reduced if averages else whole_steps.alone,
    ):
        training = way(build("tiny", 1, REHEARSAL.tokens)[0], batch)
        training.step()
        training.close()
        trained.append(training.model)
    try:
        whole_steps.check_weights("it", trained[1], trained[0], start)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("averages", [True, False])
def test_no_time_of_another_training_is_taken(averages: bool) -> None:
    for said in values_of(checks_after_a_step, averages, cluster="gloo"):
        assert said == ("" if averages else "it: ranks have different weights")


def test_weights_that_differ_from_ddps_are_refused() -> None:
    (said,) = values_of(checks_on_one_rank, cluster="gloo", world_size=1)
    assert said == "it: weights differ from DDP's by 1.000 of what the step changed"


def checks_on_one_rank() -> str:
    """Of a model that has not been trained at all."""
    start, batch, _ = build("tiny", 1, REHEARSAL.tokens)
    training = whole_steps.alone(build("tiny", 1, REHEARSAL.tokens)[0], batch)
    training.step()
    try:
        whole_steps.check_weights("it", start, training.model, start)
    except AssertionError as error:
        return str(error)
    return ""
