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

# 20 steps take FSDP2 more than a minute of CPU time on `virtual`, and on three ranks.
RUNS = [("gloo", 2, 20), ("gloo", 3, 3), ("virtual", 2, 3)]


@cache
def values(cluster: str, world_size: int, num_steps: int) -> tuple[Any, ...]:
    return values_of(peers.train_all, num_steps, world_size=world_size, cluster=cluster)


@pytest.mark.parametrize("name", [*CASES, *peers.FIXTURES])
@pytest.mark.parametrize(("cluster", "world_size", "num_steps"), RUNS)
def test_steps_end_where_fsdp2_ends(
    cluster: str, world_size: int, num_steps: int, name: str
) -> None:
    # bfloat16 keeps 8 bits; fused AdamW and torch's loop over parameters round in
    # different orders.
    tolerance = 5e-2 if name == "mixed_dtypes" else 1e-5
    for by_name in values(cluster, world_size, num_steps):
        ours, theirs = by_name[name]
        assert list(ours) == list(theirs)
        for key, want in theirs.items():
            torch.testing.assert_close(ours[key], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", peers.REFUSED)
def test_what_is_left_out_is_what_fsdp2_refuses(name: str) -> None:
    assert name in training.FIXTURES
    with pytest.raises(ol.RankError) as caught:
        ol.run(peers.train_fixture, name, 1)
    assert peers.REFUSED[name] in str(caught.value)
