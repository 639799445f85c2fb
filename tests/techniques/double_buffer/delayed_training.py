"""Training with gradients one step late, on every rank."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.grading.fixtures import toy_fixture
from overlaplab.techniques.double_buffer import DoubleBufferedReducer

NUM_STEPS = 20
SMALL_MIB = 0.0005  # a few parameters of a toy net a bucket


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With decay a parameter of zero gradient moves; one with None rests."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def make_reducer(model: nn.Module) -> DoubleBufferedReducer:
    return DoubleBufferedReducer(model, bucket_mib=SMALL_MIB)


def train(
    net_name: str,
    set_to_none: bool = True,
    num_steps: int = NUM_STEPS,
    flush_after: Collection[int] = (),
    resume_after: Collection[int] = (),
) -> dict[str, Tensor]:
    """This rank's parameters after the steps, of which the first is 1, and a flush.

    Args:
        net_name: of `TOY_NETS`.
        set_to_none: how gradients are zeroed.
        num_steps: before the last flush.
        flush_after: steps after which the pending average is flushed, too.
        resume_after: steps after which all is saved, built anew and loaded.
    """
    fixture, rank = toy_fixture(net_name), dist.get_rank()
    model = fixture.build(rank)
    reducer, optimizer = make_reducer(model), make_optimizer(model)
    for step in range(1, num_steps + 1):
        fixture.loss(model, *fixture.make_batch(rank, step)).backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if step in flush_after and reducer.flush():
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        if step in resume_after:
            saved = io.BytesIO()
            torch.save([x.state_dict() for x in (model, optimizer, reducer)], saved)
            saved.seek(0)
            reducer.remove()
            model = fixture.build(rank)
            reducer, optimizer = make_reducer(model), make_optimizer(model)
            states = torch.load(saved)
            for x, state in zip((model, optimizer, reducer), states, strict=True):
                x.load_state_dict(state)
    if reducer.flush():
        optimizer.step()
    reducer.remove()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_all(
    set_to_none: bool, nets: Collection[str], num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    return {net: train(net, set_to_none, num_steps) for net in nets}


def train_with_flushes(net: str, num_steps: int) -> dict[int, dict[str, Tensor]]:
    """By the step after which there was a flush."""
    steps = range(1, num_steps + 1)
    return {k: train(net, True, num_steps, flush_after=(k,)) for k in steps}


def train_with_resumes(net: str, num_steps: int) -> dict[int, dict[str, Tensor]]:
    """By the step after which all was loaded anew; 0: never."""
    steps = range(num_steps + 1)
    return {k: train(net, True, num_steps, resume_after=(k,)) for k in steps}
