"""A compiled model ends where one process on all batches ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from overlaplab.cluster.pool.pool import Outcome
from tests.ranks import Untimed, run_untimed
from tests.techniques.compiler.nets import (
    NETS,
    compiled_states,
    expected_states,
)

SMALL = {"bucket_mib": 0.0005}  # a few gradients a bucket
LIMITED = {"bucket_mib": 0.0002, "limit_mib": 0.01}
RUNS: dict[tuple[str, int], tuple[list[str], dict[str, Any]]] = {
    ("virtual", 1): ([*NETS], SMALL),
    ("virtual", 2): ([*NETS], SMALL),
    ("virtual", 3): ([*NETS], LIMITED),
    ("virtual", 4): ([*NETS], {"side_stream": True}),
    ("gloo", 1): ([*NETS], SMALL),
    ("gloo", 2): ([*NETS], SMALL),
    ("gloo", 3): ([*NETS], LIMITED),
    ("gloo", 4): ([*NETS], {"side_stream": True}),
}


@cache
def run_of(cluster: str, world_size: int) -> Untimed | Outcome:
    names, settings = RUNS[cluster, world_size]
    return run_untimed(
        compiled_states, names, settings, cluster=cluster, world_size=world_size
    )


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("cluster", "world_size", "name"),
    [(*run, name) for run, (names, _) in RUNS.items() for name in names],
)
def test_gradients_are_those_of_one_process(
    cluster: str, world_size: int, name: str
) -> None:
    found = [values[name] for values in run_of(cluster, world_size).values]

    expected = expected_states(name, world_size)
    # A weight used on both sides of a break is averaged in two parts, rounded twice. A
    # bfloat16 average is rounded once on `virtual`, once a rank here.
    if name in ("graph break", "mixed dtypes"):
        torch.testing.assert_close(found, expected)
    # Other ranks first, or kernels on other numbers of threads: other sums.
    elif cluster == "gloo" or name in ("gpt", "convolutions"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_nothing_races_and_everything_is_waited_for(world_size: int) -> None:
    assert run_of("virtual", world_size).warnings == ()
