"""Four steps of a toy net on every rank, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlaplab.models import TOY_NETS
from overlaplab.techniques.data_parallel import (
    BucketedReducer,
    HookReducer,
    Reducer,
    SerialReducer,
)

NUM_STEPS = 4

REDUCERS: dict[str, Callable[[nn.Module], Reducer]] = {
    "serial": SerialReducer,
    "hooks": HookReducer,
    "bucketed": lambda model: BucketedReducer(model, bucket_mib=0.0005),
    "one bucket": lambda model: BucketedReducer(model),
    "capped": lambda model: BucketedReducer(model, bucket_mib=0.0003, max_in_flight=1),
}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With decay a parameter of zero gradient moves; one with None rests."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(net_name: str, reducer_name: str, set_to_none: bool) -> dict[str, Any]:
    """This rank's parameters after the steps."""
    net = TOY_NETS[net_name]
    torch.manual_seed(7 + dist.get_rank())  # ranks differ until the broadcast
    model = net.make_model()
    reducer = REDUCERS[reducer_name](model)
    optimizer = make_optimizer(model)
    for step in range(NUM_STEPS):
        loss = model(net.make_batch(dist.get_rank(), step))
        loss.backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    reducer.remove()
    return snapshot(model)


def train_all() -> dict[tuple[str, str, bool], dict[str, Any]]:
    return {
        (net, reducer, set_to_none): train(net, reducer, set_to_none)
        for net in TOY_NETS
        for reducer in REDUCERS
        for set_to_none in (True, False)
    }


def train_alone(net_name: str, world_size: int, set_to_none: bool) -> dict[str, Any]:
    """The oracle: one process, the ranks' batches concatenated."""
    net = TOY_NETS[net_name]
    torch.manual_seed(7)
    model = net.make_model()
    optimizer = make_optimizer(model)
    for step in range(NUM_STEPS):
        batches = [net.make_batch(rank, step) for rank in range(world_size)]
        model(torch.cat(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return snapshot(model)
