"""Ranks of a measurement that fail end, whatever NCCL still waits for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from overlaplab.processes import run_ranks

pytestmark = pytest.mark.gpu(2)


def _fail(num_senders: int) -> None:
    """An error behind messages, one of which only `num_senders` ranks send."""
    other = dist.new_group()
    value = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(value, group=other)
    if dist.get_rank() < num_senders:
        dist.all_reduce(value, async_op=True)
    raise ValueError(f"of rank {dist.get_rank()}")


@pytest.mark.timeout(120)  # a guard: they never ended
@pytest.mark.parametrize("num_senders", [0, 1, 2])
def test_an_error_behind_messages_ends_all_ranks(num_senders: int) -> None:
    with pytest.raises(ProcessRaisedException, match="ValueError: of rank"):
        run_ranks(_fail, num_senders, backend="nccl", world_size=2)
