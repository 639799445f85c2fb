"""Training with gradients one step late, on every rank."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.grading.fixtures import Fixture, late_oracle, toy_fixture
from overlaplab.techniques.double_buffer import DoubleBufferedReducer

NUM_STEPS = 20
SMALL_MIB = 0.0005  # a few parameters of a toy net a bucket


def fixture_of(net_name: str, set_to_none: bool = True) -> Fixture:
    """The net and its data on this rank's device."""
    fixture, device = toy_fixture(net_name, set_to_none=set_to_none), streams.device()

    def make_batch(rank: int, step: int) -> tuple[Tensor, ...]:
        return tuple(t.to(device) for t in fixture.make_batch(rank, step))

    return replace(
        fixture,
        make_model=lambda: fixture.make_model().to(device),
        make_batch=make_batch,
    )


def late_oracle_of(
    net_name: str,
    world_size: int,
    set_to_none: bool = True,
    num_steps: int = NUM_STEPS,
    flush_after: Collection[int] = (),
) -> Mapping[str, Tensor]:
    """One process's parameters after the same, on this rank's device."""
    _, parameters = late_oracle(
        fixture_of(net_name, set_to_none),
        make_optimizer=make_optimizer,
        steps=num_steps,
        world_size=world_size,
        flush_after=(*flush_after, num_steps),
    )
    return parameters


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
    fixture, rank = fixture_of(net_name), dist.get_rank()
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
