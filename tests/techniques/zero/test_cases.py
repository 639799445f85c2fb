"""The field cases (D02 to D10) train as one process does, whatever a step runs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import overlaplab as ol
from overlaplab.cluster.pool.pool import Outcome
from tests.guards import GUARD_S
from tests.ranks import Untimed, run_untimed
from tests.techniques.zero import programs
from tests.techniques.zero.programs import CASES

RUNS = [
    ("virtual", 2, 0),
    ("virtual", 2, 1),
    ("virtual", 3, 2),
    ("virtual", 8, 1),
    ("gloo", 2, 1),
    ("gloo", 3, 0),
]


def cases_of(world_size: int) -> tuple[str, ...]:
    return tuple(CASES) if world_size < 8 else ("empty shards", "tied in two units")


@cache
def run_of(cluster: str, world_size: int, prefetch: int) -> Untimed | Outcome:
    cases = cases_of(world_size)
    return run_untimed(
        programs.train_cases, cases, prefetch, world_size=world_size, cluster=cluster
    )


@pytest.mark.parametrize(
    ("cluster", "world_size", "prefetch", "case"),
    [(*run, case) for run in RUNS for case in cases_of(run[1])],
)
def test_a_case_trains_as_one_process_on_the_concatenated_batch(
    cluster: str, world_size: int, prefetch: int, case: str
) -> None:
    run = run_of(cluster, world_size, prefetch)
    expected = programs.train_case_alone(case, world_size, prefetch != 0)
    for values in run.values:
        assert list(values[case]) == list(expected)
        for name, want in expected.items():
            # Means of means and one mean differ in the last bits; AdamW's first steps
            # make small gradients large.
            torch.testing.assert_close(values[case][name], want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("run", [run for run in RUNS if run[0] == "virtual"])
def test_no_case_leaves_a_hazard_or_a_work_behind(run: tuple[str, int, int]) -> None:
    assert run_of(*run).warnings == ()


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_what_is_frozen_stays_so_and_has_no_optimizer_state(cluster: str) -> None:
    """D09: in a unit beside what trains, and in a unit of its own in the middle."""
    biases = [f"layers.{number}.bias" for number in (0, 2, 3)]
    trains = {*biases, "head.weight", "head.bias"}
    run = ol.run(programs.half_frozen_facts, cluster=cluster, timeout_s=GUARD_S)
    for with_shards, with_states, after in run.values:
        assert with_shards == trains >= with_states
        assert {name for name, flag in after.items() if flag} == trains
    # A rank that has no element of a piece has no state of it either.
    assert set.union(*(states for _, states, _ in run.values)) == trains
