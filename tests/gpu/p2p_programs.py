"""Sends and receives in several orders, each in processes of its own."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

LARGE, SMALL = 16 * 1024 * 1024, 256  # elements: 64 MiB, 1 KiB


def exchange(order: str, num: int) -> None:
    rank = dist.get_rank()
    peer = 1 - rank
    mine = torch.full((num,), float(rank), device="cuda")
    theirs = torch.empty_like(mine)
    if order == "send, recv":
        dist.send(mine, peer)
        dist.recv(theirs, peer)
    elif order == "batch":
        ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    else:
        works = [dist.isend(mine, peer)] if order == "isend, irecv" or rank else []
        works.append(dist.irecv(theirs, peer))
        if len(works) < 2:
            works.append(dist.isend(mine, peer))
        for work in works:
            work.wait()
    torch.cuda.synchronize()
    assert theirs[-1].item() == peer


def run_rank(
    rank: int, port: int, folder: str, order: str, num: int, eager: bool
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if eager else None
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    Path(folder, f"begun{rank}").touch()
    exchange(order, num)
    Path(folder, f"ended{rank}").touch()
    os._exit(0)
