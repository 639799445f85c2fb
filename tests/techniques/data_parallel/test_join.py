"""Ranks with different numbers of batches end, with the values of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import overlaplab as ol
from overlaplab.errors import RankError
from tests.ranks import EVERYWHERE, On, everywhere, run_on
from tests.techniques.data_parallel import uneven
from tests.techniques.data_parallel.misuse import mean

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
GRID = [(on, case) for on in EVERYWHERE for case in range(len(CASES[on.ranks]))]


NUMBERS = {2: (1, 3), 3: (2, 0, 1)}  # of batches, by rank


def run(fn: Callable[..., Any], *args: Any, on: On) -> Any:
    found = run_on(on, fn, *args)
    assert found.warnings == ()
    return list(found.values)


@cache
def run_of_all(on: On) -> Any:
    return run(uneven.train_all, CASES[on.ranks], on=on)


def assert_states(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(dict(got), dict(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("on", "case"), GRID, ids=str)
def test_every_rank_ends_with_the_parameters_and_buffers_of_the_last(
    on: On, case: int
) -> None:
    numbers, kind, size, by_initial = CASES[on.ranks][case]
    want, num_steps = uneven.expected(numbers, size, by_initial)
    # One process sums in another order; bfloat16 keeps 8 bits.
    tolerance = 2e-2 if kind == "bfloat16 wire" else 1e-5
    for results in run_of_all(on):
        state, steps = results[case]
        assert steps == num_steps
        assert_states(state, want, tolerance)


@everywhere
def test_ended_ranks_that_update_keep_the_optimizers_state_for_the_next_epoch(
    on: On,
) -> None:
    numbers = NUMBERS[on.ranks]
    found = run(uneven.epochs_with_adamw, numbers, True, on=on)
    want, _ = uneven.expected(numbers, make_optimizer=uneven.adamw, num_epochs=2)
    for state in found:
        assert_states(state, want)


@everywhere
def test_torchs_join_of_a_reducer_and_a_sharded_optimizer(on: On) -> None:
    numbers = NUMBERS[on.ranks]
    found = run(uneven.with_a_sharded_optimizer, numbers, on=on)
    want, _ = uneven.expected(numbers, make_optimizer=uneven.adamw)
    for state in found:
        assert_states(state, want)


@everywhere
def test_a_group_joins_by_itself(on: On) -> None:
    # (1 + 2) / 2, then twice 2 / 2, or rank 1 alone; rank 0 stays where it is.
    right = {2: [[0.0], [1.0]], 3: [[0.0], [3.5], [3.5]]}[on.ranks]
    assert run(uneven.in_a_subgroup, on=on) == right


@everywhere
def test_an_ended_rank_keeps_its_own_gradients_out_of_the_others_steps(on: On) -> None:
    # All ranks, 1 to `on.ranks`; then all but rank 0, whose share is 1.
    together = mean(on.ranks)
    without = pytest.approx(together - 1 / on.ranks)
    found = run(uneven.own_gradients, True, on=on)
    assert found == [(together, together)] + [(without, together)] * (on.ranks - 1)
    found = run(uneven.own_gradients, False, on=on)
    assert found == [(None, together)] * on.ranks


@everywhere
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
def test_what_would_leave_ranks_apart_is_refused(on: On, how: str, says: str) -> None:
    with pytest.raises(RankError, match=says):
        run_on(on, uneven.breaks, how)


@everywhere
@pytest.mark.parametrize(
    ("how", "says"),
    [("nested", r"join\(\) inside another"), ("Join", "not the first in Join")],
)
def test_two_reducers_in_one_join_are_refused(on: On, how: str, says: str) -> None:
    # The wrong order of messages went unseen where shapes were equal.
    with pytest.raises(RankError, match=says):
        run_on(on, uneven.joins_two, how)


@everywhere
def test_a_block_that_an_error_left_leaves_the_reducer_as_it_was(on: On) -> None:
    right = [mean(on.ranks)]
    assert run(uneven.goes_on_after_an_error, on=on) == [right] * on.ranks


def test_a_join_that_is_not_enabled_asks_nothing() -> None:
    runs = [ol.run(uneven.without_uneven_data, enable) for enable in (False, True)]
    assert [run.values for run in runs] == [(1, 1)] * 2
    one_step, joined = (
        sum(s.name == "all_reduce" for s in run.timeline.of_rank(0).spans)
        for run in runs
    )
    # Before the step, after it, and who is last.
    assert joined == one_step + 3
