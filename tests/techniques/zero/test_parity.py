"""AdamW on shards ends where one process on all the data ends, on every fixture."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from overlaplab.cluster.pool.pool import Outcome
from tests.ranks import Untimed, run_untimed
from tests.techniques.zero import training
from tests.techniques.zero.training import FIXTURES

SETTINGS: dict[str, dict[str, Any]] = {
    "on demand": {"prefetch": 0},
    "prefetch 1": {},
    "prefetch 2": {"prefetch": 2},
    "kept": {"reshard_after_forward": False},
}
# Settings and world size -> after how many steps values are compared.
RUNS = {
    ("virtual", 1, "prefetch 1"): (3, 20),
    ("virtual", 2, "on demand"): (3,),
    ("virtual", 2, "prefetch 1"): (3, 20),
    ("virtual", 3, "prefetch 2"): (3,),
    ("virtual", 4, "kept"): (3,),
    ("gloo", 2, "kept"): (3, 20),
    ("gloo", 2, "on demand"): (3, 20),
    ("gloo", 3, "prefetch 2"): (3, 20),
}


@cache
def run_of(cluster: str, world_size: int, settings: str) -> Untimed | Outcome:
    return run_untimed(
        training.train_all,
        FIXTURES,
        RUNS[cluster, world_size, settings],
        SETTINGS[settings],
        world_size=world_size,
        cluster=cluster,
    )


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize(("cluster", "world_size", "settings"), RUNS)
def test_steps_end_where_one_process_ends(
    cluster: str, world_size: int, settings: str, name: str
) -> None:
    run = run_of(cluster, world_size, settings)
    steps = RUNS[cluster, world_size, settings]
    expected = training.train_alone(name, world_size, steps)
    # bfloat16 keeps 8 bits; a mean of means and one mean differ in the last of 24, and
    # AdamW makes small gradients large.
    tolerance = 5e-2 if name == "mixed_dtypes" else 1e-5
    for states in run.values:
        for got, want in zip(states[name], expected, strict=True):
            assert list(got) == list(want)
            for key, value in want.items():
                assert got[key].shape == value.shape
                torch.testing.assert_close(
                    got[key], value, rtol=tolerance, atol=tolerance
                )


@pytest.mark.parametrize(
    "run", [("virtual", 3, "prefetch 2"), ("gloo", 2, "on demand")]
)
def test_every_row_of_a_tied_vocabulary_that_no_rank_number_divides_is_right(
    run: tuple[str, int, str],
) -> None:
    """13 rows, cut within a row; the head gives each a gradient, the embedding some."""
    expected = training.train_alone("tied head", run[1])[0]["embedding.weight"]
    assert len(expected) == 13
    for states in run_of(*run).values:
        three_steps = states["tied head"][0]
        assert torch.equal(three_steps["embedding.weight"], three_steps["head.weight"])
        worst = (three_steps["embedding.weight"] - expected).abs().amax(1)
        moved = (expected - training.make_model("tied head").embedding.weight).detach()
        # In float64; every row has moved by much more.
        assert [row for row, error in enumerate(worst.tolist()) if error > 1e-9] == []
        assert moved.abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("run", [run for run in RUNS if run[0] == "virtual"])
def test_no_setting_leaves_a_hazard_or_a_work_behind(run: tuple[str, int, str]) -> None:
    assert run_of(*run).warnings == ()
