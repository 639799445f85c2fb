"""A training script for torchrun, as PyTorch's tutorial has it; it runs alone, too.

torchrun --standalone --nproc-per-node=2 training_script.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    rank = int(os.environ["RANK"])
    assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    init_process_group(
        "gloo",
        init_method="env://",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    total = train()
    dist.all_reduce(total)
    dist.barrier()
    destroy_process_group()
    return rank, total.item()


def train():
    """Its DDP goes before the group: with torch alone, gloo may stand otherwise."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(())
    device = total.device
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x.to(device)) - y.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.detach()
    return total


if __name__ == "__main__":
    print(main(), flush=True)
    os._exit(0)  # torch 2.13 is sometimes aborted in the exit of a process with gloo
