"""How lessons measure on GPUs. CPU processes rehearse: their numbers mean nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.bench.timing import Step, time_in_turn


def on_gpu() -> bool:
    """Whether this rank measures, and does not only rehearse."""
    return streams.device().type == "cuda"


def dtype() -> torch.dtype:
    """bfloat16 on GPUs; CPUs are slow at it."""
    return torch.bfloat16 if on_gpu() else torch.float32


def matrix(size: int) -> torch.Tensor:
    """Square, with entries so small that products stay finite."""
    return torch.full((size, size), 0.01, dtype=dtype(), device=streams.device())


def get_ready() -> None:
    """All ranks are here, and no device has anything to do. Collective."""
    streams.synchronize()
    dist.barrier()
    streams.synchronize()


def medians_ms(
    steps: Mapping[str, Step], rounds: int, steps_a_round: int, *, warm_up: int = 1
) -> dict[str, float]:
    """The median step of each, the slowest rank's, taken in turn. Collective.

    Args:
        warm_up: how often each runs before.
    """
    for step in steps.values():
        for _ in range(warm_up):
            step()
    streams.synchronize()
    timed = time_in_turn(steps, num_rounds=rounds, steps_a_round=steps_a_round)
    return {name: round(t.median_ns / 1e6, 5) for name, t in timed.items()}
