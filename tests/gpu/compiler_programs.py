"""What the GPU tests of the compiler run on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

import overlaplab as ol
from tests.gpu import programs


def gradients_of_a_compiled_chain(delay: bool) -> float:
    """The worst relative error of averaged gradients, to one process's.

    Args:
        delay: whether the messages are held up: each waits on a side stream for a
            delay kernel, so that a read before its wait sees the local gradient.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(
            part
            for _ in range(4)
            for part in (
                torch.nn.Linear(programs.WIDTH, programs.WIDTH),
                torch.nn.Tanh(),
            )
        )
    ).cuda()
    world = dist.get_world_size()
    batches = [programs.batch_of(rank) for rank in range(world)]
    losses = torch.stack([model(batch).square().mean() for batch in batches])
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()))
    made = torch.compile(model, backend=ol.compiler.backend(bucket_mib=1))
    worst = 0.0
    for _ in range(3):
        model.zero_grad()
        loss = made(batches[dist.get_rank()]).square().mean()
        if delay and dist.get_rank() == 1:  # the other rank's messages wait for it
            torch.cuda._sleep(programs.LONG)
        loss.backward()
        for parameter, right in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            error = (parameter.grad - right).norm() / right.norm()
            worst = max(worst, error.item())
    return worst
