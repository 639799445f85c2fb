"""Steps of AdamW end where FSDP2 ends, on all cases and fixtures that it can run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import overlaplab as ol
from tests.ranks import values_of
from tests.techniques.zero import peers, training
from tests.techniques.zero.programs import CASES

RUNS = [("gloo", 2, 8), ("virtual", 2, 3), ("virtual", 3, 3)]


@cache
def ours(cluster: str, world_size: int, num_steps: int) -> tuple[Any, ...]:
    return values_of(
        peers.train_all_with_zero3, num_steps, world_size=world_size, cluster=cluster
    )


@cache
def theirs(world_size: int) -> tuple[Any, ...]:
    """On processes: there FSDP2 is as its authors know it, and its steps take less."""
    steps = tuple(n for _, size, n in RUNS if size == world_size)
    return values_of(peers.train_all, steps, world_size=world_size, cluster="gloo")


@pytest.mark.parametrize("name", [*CASES, *peers.FIXTURES])
@pytest.mark.parametrize(("cluster", "world_size", "num_steps"), RUNS)
def test_steps_end_where_fsdp2_ends(
    cluster: str, world_size: int, num_steps: int, name: str
) -> None:
    # bfloat16 keeps 8 bits; fused AdamW and torch's loop over parameters round in
    # different orders.
    tolerance = 5e-2 if name == "mixed_dtypes" else 1e-5
    found = ours(cluster, world_size, num_steps), theirs(world_size)
    for mine, its in zip(*found, strict=True):
        got, expected = mine[name], its[name][num_steps]
        assert list(got) == list(expected)
        for key, want in expected.items():
            torch.testing.assert_close(got[key], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", peers.REFUSED)
def test_what_is_left_out_is_what_fsdp2_refuses(name: str) -> None:
    assert name in training.FIXTURES
    with pytest.raises(ol.RankError) as caught:
        ol.run(peers.train_fixture, name, (1,))
    assert peers.REFUSED[name] in str(caught.value)
