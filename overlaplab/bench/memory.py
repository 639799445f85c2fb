"""Bytes on the device: at the peak of steps, and what lives from step to step."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.bench.sharded import Training


def lasting_memory(
    training: Training, batch: tuple[Tensor, ...], others: int
) -> dict[str, Any]:
    """What lives behind a second backward, whose plan is known, beside what was said.

    Activations and full gradients are gone by then. Both numbers are without the
    optimizer's states.

    Args:
        others: bytes that are not of this way.
    """
    found: dict[str, Any] = {"states_bytes": training.states_bytes()}
    if measured := streams.device().type == "cuda":
        found["between_steps_bytes"] = allocated_bytes() - others
    training.backward(batch)
    if measured:
        found["with_gradients_bytes"] = allocated_bytes() - others
    training.update()
    if (summary := training.summary) is not None:
        said = summary.total_bytes - summary.states_bytes - summary.gradients_bytes
        found |= {"summary": asdict(summary), "said_bytes": said}
        if measured:
            without_states = found["with_gradients_bytes"] - found["states_bytes"]
            found["ratio"] = round(without_states / said, 4)
    return found


def allocated_bytes() -> int:
    """By live tensors of this process; 0 without a GPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peaks() -> dict[str, int]:
    """Bytes, the largest of all ranks, since the last reset; {} on a CPU process."""
    device = streams.device()
    if device.type != "cuda":
        return {}
    mine = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    both = torch.tensor(mine, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    names = ("peak_allocated_bytes", "peak_reserved_bytes")
    return dict(zip(names, both.tolist(), strict=True))
