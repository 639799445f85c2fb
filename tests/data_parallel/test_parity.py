"""Four training steps on ranks end where one process on all the data ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import overlaplab as ol
from overlaplab.models import TOY_NETS
from tests.data_parallel import training

# Every net with the full treatment at two ranks; the rest of the grid is thinner, so
# that the whole of it stays within seconds.
GRID = [
    (cluster, world_size, reducer, set_to_none)
    for cluster in ("virtual", "gloo")
    for world_size, reducer, set_to_none in (
        (1, "bucketed", True),
        (2, "bucketed", True),
        (2, "bucketed", False),
        (2, "serial", True),
        (2, "hooks", True),
        (2, "capped", True),
        (3, "bucketed", True),
        (4, "bucketed", False),
    )
]


def train_all(reducer: str, set_to_none: bool) -> dict[str, Any]:
    return {net: training.train(net, reducer, set_to_none) for net in TOY_NETS}


@cache
def run_of(cluster: str, world_size: int, reducer: str, set_to_none: bool) -> ol.Run:
    return ol.run(
        train_all,
        reducer,
        set_to_none,
        world_size=world_size,
        cluster=cluster,
        timeout_s=90,
    )


@pytest.mark.parametrize("net", TOY_NETS)
@pytest.mark.parametrize(("cluster", "world_size", "reducer", "set_to_none"), GRID)
def test_ranks_train_as_one_process_on_the_concatenated_batch(
    cluster: str, world_size: int, reducer: str, set_to_none: bool, net: str
) -> None:
    run = run_of(cluster, world_size, reducer, set_to_none)
    expected = training.train_alone(net, world_size, set_to_none)
    # bfloat16 keeps 8 bits, and its layer passes its rounding on to the others.
    tolerance = 2e-2 if net == "mixed_dtypes" else 1e-6
    for rank, values in enumerate(run.values):
        for name, want in expected.items():
            got = values[net][name]
            assert got.shape == want.shape
            assert torch.equal(got, run.values[0][net][name]), f"rank {rank} {name}"
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reducer", ["serial", "hooks", "bucketed", "capped"])
def test_a_reducer_leaves_no_hazard_and_no_work_behind(reducer: str) -> None:
    assert run_of("virtual", 2, reducer, True).warnings == ()
