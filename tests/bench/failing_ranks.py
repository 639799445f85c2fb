"""What a rank of a measurement does that fails; importable where it is spawned."""

from __future__ import annotations

import torch
import torch.distributed as dist


def fail_behind_messages(device: str, num_senders: int) -> None:
    """An error behind messages, one of which only `num_senders` ranks send."""
    other = dist.new_group()
    value = torch.ones(1 << 20, device=device)
    dist.all_reduce(value, group=other)
    if dist.get_rank() < num_senders:
        dist.all_reduce(value, async_op=True)
    raise ValueError(f"of rank {dist.get_rank()}")
