"""Ranks with different numbers of batches end, with the values of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import overlaplab as ol
from overlaplab.errors import RankError
from tests.guards import GUARD_S
from tests.ranks import run_untimed
from tests.techniques.data_parallel import uneven

on_both = pytest.mark.parametrize("cluster", ["virtual", "gloo"])

# Batches of each rank, reducer, micro-batches a step, divide_by_initial_world_size.
CASES: dict[int, list[tuple[tuple[int, ...], str, int, bool]]] = {
    2: [
        ((3, 2), "buckets", 1, True),
        ((3, 2), "buckets", 1, False),
        ((2, 5), "buckets", 2, True),
        ((2, 5), "buckets", 2, False),
        ((0, 2), "buckets", 1, True),
        ((2, 0), "buckets", 1, False),
        ((3, 1), "one in flight", 1, True),
        ((1, 3), "one in flight", 2, False),
        ((3, 1), "bfloat16 wire", 1, False),
        ((1, 3), "serial", 2, True),
        ((3, 1), "hooks", 1, False),
        ((0, 0), "buckets", 1, True),
    ],
    3: [
        ((1, 4, 2), "buckets", 1, True),
        ((1, 4, 2), "buckets", 1, False),
        ((0, 5, 5), "buckets", 2, False),
        ((2, 2, 2), "buckets", 1, False),
        ((0, 0, 3), "one in flight", 1, False),
        ((3, 1, 2), "bfloat16 wire", 2, True),
    ],
}
GRID = [
    (cluster, ranks, case)
    for cluster in ("virtual", "gloo")
    for ranks, cases in CASES.items()
    for case in range(len(cases))
]


def run(fn: Callable[..., Any], *args: Any, cluster: str, ranks: int = 2) -> Any:
    found = run_untimed(fn, *args, cluster=cluster, world_size=ranks)
    assert found.warnings == ()
    return list(found.values)


@cache
def run_of_all(cluster: str, ranks: int) -> Any:
    return run(uneven.train_all, CASES[ranks], cluster=cluster, ranks=ranks)


def assert_states(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(dict(got), dict(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("cluster", "ranks", "case"), GRID)
def test_every_rank_ends_with_the_parameters_and_buffers_of_the_last(
    cluster: str, ranks: int, case: int
) -> None:
    numbers, kind, size, by_initial = CASES[ranks][case]
    want, num_steps = uneven.expected(numbers, size, by_initial)
    # One process sums in another order; bfloat16 keeps 8 bits.
    tolerance = 2e-2 if kind == "bfloat16 wire" else 1e-5
    for results in run_of_all(cluster, ranks):
        state, steps = results[case]
        assert steps == num_steps
        assert_states(state, want, tolerance)


@on_both
@pytest.mark.parametrize("numbers", [(1, 3), (2, 0, 1)])
def test_ended_ranks_that_update_keep_the_optimizers_state_for_the_next_epoch(
    cluster: str, numbers: tuple[int, ...]
) -> None:
    found = run(
        uneven.epochs_with_adamw, numbers, True, cluster=cluster, ranks=len(numbers)
    )
    want, _ = uneven.expected(numbers, make_optimizer=uneven.adamw, num_epochs=2)
    for state in found:
        assert_states(state, want)


@on_both
@pytest.mark.parametrize("numbers", [(1, 3), (2, 0, 1)])
def test_torchs_join_of_a_reducer_and_a_sharded_optimizer(
    cluster: str, numbers: tuple[int, ...]
) -> None:
    found = run(
        uneven.with_a_sharded_optimizer, numbers, cluster=cluster, ranks=len(numbers)
    )
    want, _ = uneven.expected(numbers, make_optimizer=uneven.adamw)
    for state in found:
        assert_states(state, want)


@on_both
def test_a_group_joins_by_itself(cluster: str) -> None:
    # (1 + 2) / 2, then twice 2 / 2; rank 0 stays where it is.
    found = run(uneven.in_a_subgroup, cluster=cluster, ranks=3)
    assert found == [[0.0], [3.5], [3.5]]


@on_both
def test_an_ended_rank_keeps_its_own_gradients_out_of_the_others_steps(
    cluster: str,
) -> None:
    # Both ranks: (1 + 2) / 2; then rank 1 alone, divided by two: 1.
    found = run(uneven.own_gradients, True, cluster=cluster)
    assert found == [(1.5, 1.5), (1.0, 1.5)]
    found = run(uneven.own_gradients, False, cluster=cluster)
    assert found == [(None, 1.5), (None, 1.5)]


@on_both
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("inside no_sync", r"join\(\) inside no_sync"),
        ("open step", r"left while a step is open.*reducer\.wait\(\)"),
        ("buffers", r"reducer\.broadcast_buffers\(\) inside join"),
        ("abandon", r"reducer\.abandon\(\) inside join"),
        ("throw", "exhausted"),
    ],
)
def test_what_would_leave_ranks_apart_is_refused(
    cluster: str, how: str, says: str
) -> None:
    with pytest.raises(RankError, match=says):
        ol.run(uneven.breaks, how, cluster=cluster, timeout_s=GUARD_S)


@on_both
@pytest.mark.parametrize(
    ("how", "says"),
    [("nested", r"join\(\) inside another"), ("Join", "not the first in Join")],
)
def test_two_reducers_in_one_join_are_refused(
    cluster: str, how: str, says: str
) -> None:
    # The wrong order of messages went unseen where shapes were equal.
    with pytest.raises(RankError, match=says):
        run(uneven.joins_two, how, cluster=cluster)


@on_both
def test_a_block_that_an_error_left_leaves_the_reducer_as_it_was(cluster: str) -> None:
    assert run(uneven.goes_on_after_an_error, cluster=cluster) == [[1.5]] * 2


def test_a_join_that_is_not_enabled_asks_nothing() -> None:
    runs = [ol.run(uneven.without_uneven_data, enable) for enable in (False, True)]
    assert [run.values for run in runs] == [(1, 1)] * 2
    one_step, joined = (
        sum(s.name == "all_reduce" for s in run.timeline.of_rank(0).spans)
        for run in runs
    )
    # Before the step, after it, and who is last.
    assert joined == one_step + 3
