"""Ranks with gradients one step late train as one process with a queue of one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from overlaplab.models import TOY_NETS
from tests.ranks import run_untimed, values_of
from tests.techniques.double_buffer import delayed_training as training

NETS = tuple(TOY_NETS)
SHORT, LONG = 5, training.NUM_STEPS
GRID = [
    (*row, net)
    for row in (
        ("virtual", 1, True, SHORT),
        ("virtual", 2, True, LONG),
        ("virtual", 2, False, SHORT),
        ("virtual", 3, True, SHORT),
        ("virtual", 4, False, SHORT),
        ("gloo", 2, True, LONG),
        ("gloo", 3, False, LONG),
    )
    for net in NETS
]
# The plain case, and one in which each rank lacks other gradients in every step.
FLUSHED = ("mlp", "alternating")


@cache
def values(
    cluster: str, world_size: int, set_to_none: bool, num_steps: int
) -> tuple[Any, ...]:
    """One run for all nets of a row of the grid."""
    args = (training.train_all, set_to_none, NETS, num_steps)
    return values_of(*args, cluster=cluster, world_size=world_size)


@pytest.mark.parametrize(
    ("cluster", "world_size", "set_to_none", "num_steps", "net"), GRID
)
def test_ranks_train_as_one_process_whose_gradients_are_one_step_late(
    cluster: str, world_size: int, set_to_none: bool, num_steps: int, net: str
) -> None:
    by_rank = values(cluster, world_size, set_to_none, num_steps)
    # bfloat16 keeps 8 bits, and its layer passes its rounding on to the others.
    tolerance = 2e-2 if net == "mixed_dtypes" else 1e-6
    expected = training.late_oracle_of(net, world_size, set_to_none, num_steps)
    for name, want in expected.items():
        for rank, of_rank in enumerate(by_rank):
            got = of_rank[net][name]
            assert got.shape == want.shape
            assert torch.equal(got, by_rank[0][net][name]), f"rank {rank} {name}"
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_hazard_is_seen_and_no_work_is_left_behind(set_to_none: bool) -> None:
    nets = ("mlp", "alternating", "mixed_dtypes", "channels_last", "branches")
    assert run_untimed(training.train_all, set_to_none, nets, SHORT).warnings == ()


@pytest.mark.parametrize("net", FLUSHED)
def test_a_flush_after_any_step_is_an_update_with_the_last_average(net: str) -> None:
    found, _ = values_of(training.train_with_flushes, net, SHORT)
    assert list(found) == [1, 2, 3, 4, 5]
    for step, got in found.items():
        flush_after = (step,) if step < SHORT else ()
        expected = training.late_oracle_of(net, 2, True, SHORT, flush_after)
        for name, want in expected.items():
            torch.testing.assert_close(got[name], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
@pytest.mark.parametrize("net", FLUSHED)
def test_training_that_is_resumed_ends_bit_by_bit_where_it_would_have(
    cluster: str, net: str
) -> None:
    for of_rank in values_of(training.train_with_resumes, net, SHORT, cluster=cluster):
        for step in range(1, SHORT + 1):
            for name, want in of_rank[0].items():
                assert torch.equal(of_rank[step][name], want), f"step {step}: {name}"
