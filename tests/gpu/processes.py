"""Start one process a GPU, run a function in each, collect what it returns."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_on_gpus(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """`fn(*args)` on `world_size` GPUs; the values by rank. `fn` must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(world_size, folder, fn, args), nprocs=world_size)
        return [
            pickle.loads(Path(folder, str(rank)).read_bytes())
            for rank in range(world_size)
        ]


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A file, and not a port: a port that was free may be taken by now.
    meeting = f"file://{folder}/meeting"
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        init_method=meeting,
        rank=rank,
        world_size=world_size,
        device_id=device,
    )
    try:
        value = fn(*args)
        torch.cuda.synchronize()
        Path(folder, str(rank)).write_bytes(pickle.dumps(value))
    finally:
        dist.destroy_process_group()
