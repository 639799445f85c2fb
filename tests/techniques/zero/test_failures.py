"""A rank that dies in mid-step: the others end, and the error says where."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab.models.toy_nets import WIDTH, random_batch
from tests.guards import GUARD_S, wait_until
from tests.techniques.zero.programs import Blocks


def trains_and_dies(where: str, folder: Path) -> None:
    """Rank 1 is killed in layer 2 of the second step, which follows a plan."""
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    torch.manual_seed(1)
    model = Blocks()
    zero = ol.Zero3(model)
    step = 0

    def die(*_: Any) -> None:
        if step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "forward":
        model.layers[2].register_forward_pre_hook(die)
    else:
        model.layers[2].register_full_backward_hook(die)  # type: ignore[arg-type]
    while True:
        model(random_batch(dist.get_rank(), step, WIDTH)).backward()
        zero.wait()
        step += 1


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_rank_is_named_with_its_last_collective_and_all_end(
    where: str, tmp_path: Path
) -> None:
    with pytest.raises(ol.RankError) as caught:
        ol.run(
            trains_and_dies,
            *(where, tmp_path),
            world_size=3,
            cluster="gloo",
            timeout_s=GUARD_S,
        )
    assert "rank 1 of 3 died: its process was killed by SIGKILL" in str(caught.value)
    # Of the second step, in layer 2 or, ahead of it, beside it.
    assert re.search(r"launched: \w+ #\d+ .*\(\w+ layers\.[123]\)", str(caught.value))
    processes = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert wait_until(lambda: all(map(is_gone, processes)))
