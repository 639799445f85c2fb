"""Windows of micro-batches: as they should be, and as they should not."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from overlaplab.techniques.data_parallel import BucketedReducer
from tests.techniques.data_parallel.misuse import Stop, average, batch, weight
from tests.techniques.data_parallel.training import REDUCERS


def fails_in_a_window(then: str) -> None:
    """The second micro-batch fails between two weights; the step goes on."""
    net = nn.Sequential(weight(), Stop(), weight())
    reducer = BucketedReducer(net)
    with reducer.no_sync():
        net(batch(0)).sum().backward()
        net[1].now = True
        with contextlib.suppress(ZeroDivisionError):
            net(batch(0)).sum().backward()
        net[1].now = False
        if then == "micro":
            net(batch(0)).sum().backward()
    if then == "backward":
        net(batch(0)).sum().backward()
    reducer.wait()


def accumulate(reducer: str, cut_short: bool, nested: bool) -> list[float]:
    """Micro gradients 1, 3 on rank 0, 2, 5 on rank 1 and 4, 6 on rank 2."""
    model = weight()
    reduces = REDUCERS[reducer](model)
    first, second = ((1.0, 3.0), (2.0, 5.0), (4.0, 6.0))[dist.get_rank()]
    out = model(torch.full((1, 1), second))  # the backward's place counts
    with reduces.no_sync():
        if nested:
            with reduces.no_sync():
                pass
        model(torch.full((1, 1), first)).sum().backward()
        if cut_short:
            out.sum().backward()
    if not cut_short:
        out.sum().backward()
    reduces.wait()
    return average(model)


def leaves_no_sync_by_an_error() -> list[float]:
    model = weight()
    reducer = BucketedReducer(model)
    try:
        with reducer.no_sync():
            raise KeyError("of the user's")
    except KeyError:
        pass
    model(batch(0)).sum().backward()
    reducer.wait()
    return average(model)


def waits_in_no_sync(reducer: str) -> None:
    model = weight()
    reduces = REDUCERS[reducer](model)
    with reduces.no_sync():
        model(batch(0)).sum().backward()
        reduces.wait()


def accumulates_in_place() -> bool:
    """The tensor of the first micro-batch is the one that holds the average."""
    model = weight()
    reducer = BucketedReducer(model)
    with reducer.no_sync():
        model(batch(0)).sum().backward()
    first = model.weight.grad
    model(batch(1)).sum().backward()
    reducer.wait()
    return model.weight.grad is first
