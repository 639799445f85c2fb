"""Training with gradients one step late, on ranks, and the same in one process."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.models import TOY_NETS
from overlaplab.techniques.double_buffer import DoubleBufferedReducer

NUM_STEPS = 20
SMALL_MIB = 0.0005  # a few parameters of a toy net a bucket


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With decay a parameter of zero gradient moves; one with None rests."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(
    net_name: str,
    set_to_none: bool = True,
    num_steps: int = NUM_STEPS,
    flushes: Collection[int] = (),
    resumes: Collection[int] = (),
) -> dict[str, Tensor]:
    """This rank's parameters after the steps and a last flush.

    Args:
        net_name: of `TOY_NETS`.
        set_to_none: how gradients are zeroed.
        num_steps: of training, before the last flush.
        flushes: steps after which the pending average is flushed.
        resumes: steps after which all is saved, built anew and loaded.
    """
    net = TOY_NETS[net_name]
    torch.manual_seed(7 + dist.get_rank())  # ranks differ until the broadcast
    model = net.make_model()
    reducer = DoubleBufferedReducer(model, bucket_mib=SMALL_MIB)
    optimizer = make_optimizer(model)
    for step in range(num_steps):
        model(net.make_batch(dist.get_rank(), step)).backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if step in flushes and reducer.flush():
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        if step in resumes:
            saved = io.BytesIO()
            torch.save([x.state_dict() for x in (model, optimizer, reducer)], saved)
            saved.seek(0)
            reducer.remove()
            model = net.make_model()
            reducer = DoubleBufferedReducer(model, bucket_mib=SMALL_MIB)
            optimizer = make_optimizer(model)
            states = torch.load(saved)
            for x, state in zip((model, optimizer, reducer), states, strict=True):
                x.load_state_dict(state)
    if reducer.flush():
        optimizer.step()
    reducer.remove()
    return snapshot(model)


def train_alone(
    net_name: str,
    world_size: int,
    num_steps: int = NUM_STEPS,
    flushes: Collection[int] = (),
) -> dict[str, Tensor]:
    """The oracle: one process, the ranks' batches concatenated, a queue of one."""
    net = TOY_NETS[net_name]
    torch.manual_seed(7)
    model = net.make_model()
    optimizer = make_optimizer(model)
    parameters = list(model.parameters())
    nothing: list[Any] = [None] * len(parameters)

    def update(gradients: list[Any]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    late = nothing
    for step in range(num_steps):
        batches = [net.make_batch(rank, step) for rank in range(world_size)]
        model(torch.cat(batches)).backward()
        now = [p.grad for p in parameters]
        update(late)
        late = now
        if step in flushes:
            update(late)
            late = nothing
    update(late)
    return snapshot(model)


def train_all(set_to_none: bool, nets: Collection[str]) -> dict[str, Any]:
    return {net: train(net, set_to_none) for net in nets}


def train_with_flushes(net: str, num_steps: int) -> dict[int, dict[str, Tensor]]:
    """By the step after which there was a flush."""
    return {k: train(net, True, num_steps, flushes=(k,)) for k in range(num_steps)}


def train_with_resumes(net: str, num_steps: int) -> dict[int, dict[str, Tensor]]:
    """By the step after which all was loaded anew; -1: never."""
    every = range(-1, num_steps)
    return {k: train(net, True, num_steps, resumes=(k,)) for k in every}
