"""Predicted against measured: arithmetic, the repeated step, a rehearsal, the page."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.bench.predict.compare import (
    Row,
    calls_ns,
    claim,
    compare,
    launches_of,
    quantile,
    ranking,
    summary,
)
from overlaplab.bench.predict.measure import GPU, Grid, describe, measure_on_link
from overlaplab.bench.predict.predict import from_first_step, step_ends
from overlaplab.calibrate.operators import record_steps, step_starts
from overlaplab.calibrate.plan import GPU as CALIBRATION
from overlaplab.models import TransformerConfig
from overlaplab.program import resolve
from overlaplab.techniques.data_parallel import BucketedReducer
from prediction import fill
from tests.calibrate.small_plan import SMALL as SMALL_PLAN
from tests.ranks import run_here

RESULTS = Path(__file__).parents[2] / "overlaplab/bench/results"
PAGE = Path(__file__).parents[2] / "course/prediction.md"
SMALL = TransformerConfig(num_layers=1, d_model=8, num_heads=1, vocab_size=16)


def row(variant: str, measured: float, predicted: float, **more: float) -> Row:
    return Row("nvlink", "gpt", 8, variant, measured, predicted, 0, 0, **more)


# The arithmetic.


def test_errors_are_those_of_predicted_over_measured() -> None:
    rows = [
        row("a", 100, 104, exposed_ms=10, predicted_exposed_ms=8),
        row("b", 200, 190, exposed_ms=0, predicted_exposed_ms=2),
        row("c", 50, 50),
    ]
    found = summary(rows)
    assert found["step_median"] == 0.04 and found["step_p90"] == 0.05
    assert found["step_worst"] == 0.05 and found["configurations"] == 3
    # Where nothing was exposed there is no ratio, but a share of the step.
    assert found["exposed_median"] == 0.2
    assert found["exposed_of_step_median"] == 0.01
    assert found["exposed_of_step_p90"] == 0.02


def test_only_pairs_that_differ_by_more_than_3_percent_have_an_order() -> None:
    rows = [row("a", 100, 90), row("b", 102.9, 80), row("c", 110, 85)]
    assert ranking(rows) == (2, 1)  # c is slower than both; predicted below a


def test_variants_of_different_cases_are_not_compared() -> None:
    other = Row("p2p-off", "gpt", 8, "a", 10, 999, 0, 0)
    assert ranking([row("a", 100, 100), other]) == (0, 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_quantile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-6
    below = [v for v in values if v < found]
    assert len(below) < share * len(values) + 1e-6


def test_launches_cost_the_mean_of_before_and_after_the_steps_that_they_bound() -> None:
    def timed(ns: int) -> dict[str, Any]:
        return {"parameters": 4, "variants": {"compute": {"step_ns": ns}}}

    found = launches_of({"launches": timed(10), "launches_after": timed(21)})
    assert found == timed(15)
    assert launches_of({"launches": timed(10)}) == timed(10)


# The recorded steps.


@pytest.mark.parametrize("hardware", ["chalk", "h100-nvlink", "ethernet-100g"])
def test_steps_take_as_long_without_the_construction_of_the_model(
    hardware: str,
) -> None:
    whole = record_steps(
        SMALL,
        2,
        4,
        "float32",
        num_steps=4,
        make_reducer=lambda model: BucketedReducer(model, bucket_mib=0.0005),
    )
    steps = from_first_step(whole)
    assert [op.index for op in steps.ranks[0]] == list(range(len(steps.ranks[0])))
    first, *others = (
        step_ends(resolve(each, hardware), step_starts(each.ranks[0]))
        for each in (whole, steps)
    )
    # The recorded ones begin behind a broadcast, which the first step waits for.
    assert [[b - a for a, b in itertools.pairwise(ends)] for ends in others] == [
        [b - a for a, b in itertools.pairwise(first)]
    ]


# The calibration sees nothing of the grid.


def test_no_configuration_of_the_grid_is_calibrated_on() -> None:
    from overlaplab.bench.workload import MODELS

    calibrated = {
        (case.d_model, case.num_layers)
        for case in (
            *CALIBRATION.models,
            CALIBRATION.launch_model,
            CALIBRATION.contention,
        )
    }
    for name, _, _ in GPU.cases():
        config = MODELS[name]
        assert (config.d_model, config.num_layers) not in calibrated
        assert config.d_model not in {width for width, _ in calibrated}


# A rehearsal of both halves.

GRID = Grid(
    batches={"tiny": (1,)},
    launch_bound={"tiny": (2,)},
    buckets_mib=(0.2,),
    tokens=8,
    rounds=1,
    steps_a_round=2,
    warmup=1,
)


def test_both_halves_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    head = {
        "benchmark": "predict",
        "world_size": 2,
        "settings": describe(GRID, SMALL_PLAN),
    }
    run_here(
        measure_on_link,
        head,
        "nvlink",
        GRID,
        SMALL_PLAN,
        out,
        2e9,
        backend="gloo",
        world_size=2,
    )
    measured = json.loads(out.read_text())
    cases = measured["links"]["nvlink"]["cases"]
    assert [case["launch_bound"] for case in cases] == [True, False]
    assert set(cases[0]["variants"]) == {"serial", "per parameter", "bucketed 0.2"}
    answer = compare(measured, lambda what: None)
    assert len(answer["rows"]) == len(answer["launch_bound"]["rows"]) == 3
    assert all(row["predicted_step_ms"] > 0 for row in answer["rows"])
    assert answer["summary"]["configurations"] == 3
    again = compare(measured, lambda what: None)
    assert again == answer
    assert "3 configurations" in claim(answer)


def test_launches_are_told_by_kind() -> None:
    times = {"compute": 100, "hooks": 108, "per parameter": 180, "one bucket": 130}
    variants: dict[str, Any] = {name: {"step_ns": ns} for name, ns in times.items()}
    variants["buckets"] = {"step_ns": 160, "buckets": 4}
    launches = {"parameters": 4, "calls": {"kernel": 9}, "variants": variants}
    assert calls_ns(launches) == {
        "kernel": 9,
        "hook": 2,
        "message": 20,
        "bucket": 10,  # (160 - 130) for three more
        "tensor": 7,
    }
    del variants["buckets"]  # no process group
    assert calls_ns(launches) == {"kernel": 9, "hook": 2}


def test_a_place_of_the_page_that_nobody_knows_is_refused() -> None:
    compared = {
        "summary": summary([row("a", 1, 1)]),
        "by_link": {},
        "calibrated": {},
        "calls_ns": {},
        "cards": [],
        "rows": [],
        "launch_bound": {"rows": []},
        "machines": {},
    }
    page = "before\n<!-- claim -->\nold\n<!-- end -->\nafter\n"
    assert "old" not in (filled := fill(page, compared))
    assert filled.startswith("before\n") and filled.endswith("<!-- end -->\nafter\n")
    assert fill(filled, compared) == filled
    with pytest.raises(KeyError, match="wrong"):
        fill("<!-- wrong -->\n<!-- end -->\n", compared)


def test_the_page_says_what_the_stored_comparison_says() -> None:
    compared = json.loads((RESULTS / "predict-2xH200-compared.json").read_text())
    page = PAGE.read_text()
    assert fill(page, compared) == page
    rows = [Row(**values) for values in compared["rows"]]
    assert summary(rows) == compared["summary"]
    assert claim(compared) in page


def test_the_stored_comparison_is_of_the_stored_measurements() -> None:
    compared = json.loads((RESULTS / "predict-2xH200-compared.json").read_text())
    stored = json.loads((RESULTS / "predict-2xH200.json").read_text())
    times = {
        (link, case["model"], case["batch"], name): variant["median_ms"]
        for link, found in stored["links"].items()
        for case in found["cases"]
        for name, variant in case["variants"].items()
    }
    rows = compared["rows"] + compared["launch_bound"]["rows"]
    found = {
        (r["link"], r["model"], r["batch"], r["variant"]): r["step_ms"] for r in rows
    }
    assert found == times
