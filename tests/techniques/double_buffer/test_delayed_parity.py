"""Ranks with gradients one step late train as one process with a queue of one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import overlaplab as ol
from overlaplab.models import TOY_NETS
from tests.guards import GUARD_S
from tests.techniques.double_buffer import delayed_training as training

NETS = tuple(TOY_NETS)
GRID = [
    (cluster, world_size, set_to_none, net)
    for cluster, world_size, set_to_none in (
        ("virtual", 1, True),
        ("virtual", 2, True),
        ("virtual", 2, False),
        ("virtual", 3, True),
        ("virtual", 4, False),
        ("gloo", 2, True),
        ("gloo", 3, False),
    )
    for net in NETS
]
SHORT = 5
# Where a rank has no gradient of its own, and the plain case.
RESUMED = ("mlp", "alternating")


@cache
def run_of(cluster: str, world_size: int, set_to_none: bool) -> ol.Run:
    """One run for all nets of a row of the grid."""
    return ol.run(
        training.train_all,
        set_to_none,
        NETS,
        world_size=world_size,
        cluster=cluster,
        timeout_s=GUARD_S,
    )


@pytest.mark.parametrize(("cluster", "world_size", "set_to_none", "net"), GRID)
def test_ranks_train_as_one_process_whose_gradients_are_one_step_late(
    cluster: str, world_size: int, set_to_none: bool, net: str
) -> None:
    run = run_of(cluster, world_size, set_to_none)
    expected = training.train_alone(net, world_size)
    # bfloat16 keeps 8 bits, and its layer passes its rounding on to the others.
    tolerance = 2e-2 if net == "mixed_dtypes" else 1e-6
    for rank, values in enumerate(run.values):
        for name, want in expected.items():
            got = values[net][name]
            assert got.shape == want.shape
            assert torch.equal(got, run.values[0][net][name]), f"rank {rank} {name}"
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_no_hazard_is_seen_and_no_work_is_left_behind() -> None:
    assert run_of("virtual", 2, True).warnings == ()
    assert run_of("virtual", 2, False).warnings == ()


@pytest.mark.parametrize("net", RESUMED)
def test_a_flush_after_any_step_is_an_update_with_the_last_average(net: str) -> None:
    run = ol.run(training.train_with_flushes, net, SHORT, world_size=2)
    assert run.warnings == ()
    for k, got in run.values[0].items():
        want = training.train_alone(net, 2, SHORT, flushes=(k,))
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("cluster", "world_size"), [("virtual", 2), ("gloo", 2)])
@pytest.mark.parametrize("net", RESUMED)
def test_training_that_is_resumed_ends_bit_by_bit_where_it_would_have(
    cluster: str, world_size: int, net: str
) -> None:
    run = ol.run(
        training.train_with_resumes,
        net,
        SHORT,
        world_size=world_size,
        cluster=cluster,
        timeout_s=GUARD_S,
    )
    assert run.warnings == ()
    for by_step in run.values:
        for k in range(SHORT):
            for name, want in by_step[-1].items():
                assert torch.equal(by_step[k][name], want), f"after step {k}: {name}"
