"""The benchmark of ZeRO-3: a rehearsal of the whole of it on the CPU."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import overlaplab as ol
from overlaplab.bench import sharded, zero3
from overlaplab.bench.predict.zero3 import predict_zero3
from overlaplab.bench.sharded import WAYS, Training
from overlaplab.bench.workload import build_model
from overlaplab.hardware import find_hardware
from tests.ranks import values_of

EAGER = [way for way in WAYS if "captured" not in way]  # all that a CPU can run
PLAN = zero3.Plan(batches=(1, 2), tokens=8, warmup=1, rounds=1, steps_a_round=2)


def pieces_of_rank_0() -> list[torch.nn.Parameter]:
    def shards() -> list[torch.nn.Parameter]:
        return ol.Zero3(build_model("tiny")[0]).shards()

    pieces: list[torch.nn.Parameter] = values_of(shards)[0]
    return pieces


def on_gloo(fn: Callable[..., Any], *args: Any) -> None:
    values_of(fn, *args, cluster="gloo")


def rehearse(
    plan: zero3.Plan,
    out: Path,
    seconds: float = 1000,
    on_all_ranks: Callable[..., None] = on_gloo,
) -> Any:
    zero3.measure({}, ["tiny"], plan, out, time.time() + seconds, on_all_ranks)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return rehearse(PLAN, tmp_path_factory.mktemp("zero3") / "new" / "zero3.json")


def test_every_way_is_timed_at_every_batch_size(measured: Any) -> None:
    (model,) = measured["models"]
    refused = model["not_measured"]
    assert [*EAGER, *refused] == list(WAYS) and model["rounds"] == 1
    assert all("a CUDA graph needs CUDA" in why for why in refused.values())
    assert measured["world_size"] == 2 and "torch" in measured
    for case, batch in zip(model["cases"], (1, 2), strict=True):
        assert case["batch"] == batch and list(case["variants"]) == EAGER
        for way, row in case["variants"].items():
            assert len(row["samples_ms"]) == 2 and row["median_ms"] > 0
            assert row["settings"] == sharded.settings_of(way)
        assert case["ratio_to_ddp"]["ddp"] == 1
        of_peers = [case["ratio_to_best_fsdp2"][w] for w in EAGER if "fsdp2" in w]
        assert min(of_peers) == 1


def test_what_memory_was_said_stands_in_the_file(measured: Any) -> None:
    said = measured["models"][0]["memory"]["ours"]
    model, _ = build_model("tiny")
    expected = ol.techniques.zero.plan_memory(model, 2)
    assert said["summary"]["ring_bytes"] == expected.ring_bytes
    lasting = expected.total_bytes - expected.states_bytes - expected.gradients_bytes
    assert said["said_bytes"] == lasting
    # AdamW counts in four bytes for each piece of rank 0 that has an element.
    counted = sum(piece.numel() > 0 for piece in pieces_of_rank_0())
    assert said["states_bytes"] == expected.states_bytes + 4 * counted


def test_the_virtual_cluster_predicts_each_way_but_ddp(measured: Any) -> None:
    lines = list(predict_zero3(measured, find_hardware("chalk"), batches=[2]))
    one, two = (case["variants"] for case in measured["models"][0]["cases"])
    assert len(lines) == len(EAGER) - 1
    assert not any("predicted_ms" in row for row in one.values())
    assert {way for way, row in two.items() if "predicted_ms" not in row} == {"ddp"}
    # What is kept is not gathered again.
    assert two["fsdp2 kept"]["predicted_ms"] < two["fsdp2"]["predicted_ms"]
    for way in set(EAGER) - {"ddp"}:
        assert 0 < two[way]["predicted_exposed_ms"] < two[way]["predicted_ms"]


def test_a_captured_step_is_predicted_without_its_launches(measured: Any) -> None:
    found = copy.deepcopy(measured)
    (case,) = [c for c in found["models"][0]["cases"] if c["batch"] == 1]
    row = case["variants"]["ours"]
    case["variants"] = {"ours": row, "ours captured": dict(row)}
    assert len(list(predict_zero3(found, find_hardware("h200-nvlink"), (), [1]))) == 2
    eager, captured = (its["predicted_ms"] for its in case["variants"].values())
    assert captured < eager / 2  # of a tiny model a step is little but launches


def half_gradients() -> None:
    """A way whose ranks keep their own gradients."""

    def alone(model: Any) -> Training:
        return Training(model, list(model.parameters()), sharded=False)

    sharded.WAYS = zero3.WAYS = {"ddp": sharded.ddp, "alone": alone}  # type: ignore[misc]


def measure_wrong(way: str, plan: zero3.Plan, out: Path) -> None:
    before = sharded.WAYS
    half_gradients()
    try:
        zero3.measure_way(way, plan, out)
    finally:
        sharded.WAYS = zero3.WAYS = before  # type: ignore[misc]


def test_a_way_with_wrong_gradients_is_not_timed(tmp_path: Path) -> None:
    out = tmp_path / "wrong.json"
    plan = replace(PLAN, ways=("ddp", "alone"), batches=(1,), rounds=2)
    found = rehearse(plan, out, on_all_ranks=lambda _, *a: on_gloo(measure_wrong, *a))
    (model,) = found["models"]
    assert "the first gradient has norm" in model["not_measured"]["alone"]
    (row,) = model["cases"][0]["variants"].items()
    assert row[0] == "ddp" and len(row[1]["samples_ms"]) == 2 * 2


def test_a_job_that_ends_costs_no_other_way_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(PLAN, ways=("ddp", "ours"), batches=(1,), rounds=1)

    def ends(fn: Callable[..., Any], way: str, *args: Any) -> None:
        if way == "ddp":
            raise RuntimeError("process 0 terminated")
        on_gloo(fn, way, *args)

    (model,) = rehearse(plan, tmp_path / "one.json", on_all_ranks=ends)["models"]
    assert model["not_measured"] == {"ddp": "process 0 terminated"}
    assert list(model["cases"][0]["variants"]) == ["ours"]
    said = [x for x in capsys.readouterr().err.splitlines() if "round" in x]
    assert said == ["tiny, round 1: ddp", "tiny, round 1: ours"]


def test_what_no_time_was_left_for_is_said(tmp_path: Path) -> None:
    (model,) = rehearse(PLAN, tmp_path / "late.json", seconds=-1)["models"]
    assert set(model["not_measured"].values()) == {"no time was left"}
    assert set(model["not_measured"]) == set(WAYS)


@pytest.mark.parametrize(
    ("way", "num_groups"),
    [("fsdp2 prefetch 2, ends", 1), ("fsdp2 prefetch 2, two groups", 2), ("ours", 2)],
)
def test_gathers_and_scatters_share_a_group_or_do_not(
    way: str, num_groups: int
) -> None:
    def one_step() -> None:
        model, _ = build_model("tiny")
        text = torch.zeros(1, 8, dtype=torch.int64, device=ol.device())
        WAYS[way](model).step((text, text))

    program = ol.run(one_step).program
    assert program is not None
    collectives = [op.collective for op in program.ranks[0] if op.collective]
    kinds = ("all_gather", "reduce_scatter")
    groups = {c.group for c in collectives if c.operation in kinds}
    assert len(groups) == num_groups
