"""Four training steps on ranks end where one process on all the data ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from overlaplab.cluster.pool.pool import Outcome
from overlaplab.models import TOY_NETS
from tests.ranks import Untimed, run_untimed
from tests.techniques.data_parallel import training

TRAPS = ("tied", "unused", "uneven", "zero_element", "mixed_dtypes", "channels_last")
ALL = tuple(TOY_NETS)

# Every net at one to four ranks with buckets; the other reducers on the worst six.
GRID = [
    (cluster, world_size, reducer, set_to_none, net)
    for cluster in ("virtual", "gloo")
    for world_size, reducer, set_to_none, nets in (
        (1, "bucketed", True, TRAPS),
        (2, "bucketed", True, ALL),
        (2, "bucketed", False, ALL),
        (2, "serial", True, TRAPS),
        (2, "hooks", True, TRAPS),
        (2, "capped", True, TRAPS),
        (3, "bucketed", True, ALL),
        (3, "serial", True, TRAPS),
        (3, "hooks", True, TRAPS),
        (3, "capped", True, TRAPS),
        (4, "bucketed", False, ALL if cluster == "virtual" else TRAPS),
    )
    for net in nets
]


def train_all(reducer: str, set_to_none: bool, nets: tuple[str, ...]) -> dict[str, Any]:
    return {net: training.train(net, reducer, set_to_none) for net in nets}


@cache
def run_of(
    cluster: str, world_size: int, reducer: str, set_to_none: bool
) -> Untimed | Outcome:
    """One run for all nets of a row of the grid."""
    row = (cluster, world_size, reducer, set_to_none)
    nets = tuple(net for *key, net in GRID if tuple(key) == row)
    return run_untimed(
        train_all, reducer, set_to_none, nets, world_size=world_size, cluster=cluster
    )


@pytest.mark.parametrize(
    ("cluster", "world_size", "reducer", "set_to_none", "net"), GRID
)
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
