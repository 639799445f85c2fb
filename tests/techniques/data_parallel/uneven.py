"""Ranks with different numbers of batches, and what they should end with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from overlaplab import streams
from overlaplab.models.toy_nets import WIDTH, random_batch
from overlaplab.techniques.data_parallel import (
    BFloat16Wire,
    BucketedReducer,
    HookReducer,
    Reducer,
    SerialReducer,
)

SMALL_MIB = 0.0001  # one or two parameters a bucket
State = dict[str, Tensor]

REDUCERS: dict[str, Callable[[nn.Module], Reducer]] = {
    "buckets": lambda model: BucketedReducer(model, bucket_mib=SMALL_MIB),
    "one in flight": lambda model: BucketedReducer(
        model, bucket_mib=SMALL_MIB, max_in_flight=1, reduce_dtype=torch.float64
    ),
    "bfloat16 wire": lambda model: BucketedReducer(
        model, bucket_mib=SMALL_MIB, wire=BFloat16Wire(dist.group.WORLD)
    ),
    "serial": SerialReducer,
    "hooks": HookReducer,
}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [
        nn.Linear(WIDTH, 6, bias=False),  # its gradient would be rounding alone
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Linear(6, 2),
    ]
    model = nn.Sequential(*layers)
    return model.to(streams.device()) if dist.is_initialized() else model


def state_of(model: nn.Module) -> State:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def windows(rank: int, number: int, size: int = 1) -> Iterator[list[Tensor]]:
    """A rank's batches, `size` a step; the last step may have fewer."""
    batches = [random_batch(rank, step, WIDTH) for step in range(number)]
    if dist.is_initialized():  # the oracle stays on the CPU
        batches = [batch.to(streams.device()) for batch in batches]
    for first in range(0, number, size):
        yield batches[first : first + size]


def backward(model: nn.Module, batch: Tensor) -> None:
    model(batch).square().mean().backward()


def accumulate(model: nn.Module, reducer: Reducer, window: Sequence[Tensor]) -> None:
    with reducer.no_sync():
        for batch in window[:-1]:
            backward(model, batch)
    backward(model, window[-1])
    reducer.wait()


def train(
    numbers: Sequence[int], kind: str, size: int, by_initial: bool
) -> tuple[State, int]:
    """This rank's state after its `numbers[rank]` batches, and its steps."""
    rank = dist.get_rank()
    model = make_model(seed=rank)
    reducer = REDUCERS[kind](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reducer.join(divide_by_initial_world_size=by_initial):
        for window in windows(rank, numbers[rank], size):
            optimizer.zero_grad()
            accumulate(model, reducer, window)
            optimizer.step()
    return state_of(model), reducer.num_steps


def train_all(cases: Sequence[Any]) -> list[tuple[State, int]]:
    return [train(*case) for case in cases]


def expected(
    numbers: Sequence[int],
    size: int = 1,
    by_initial: bool = True,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    num_epochs: int = 1,
) -> tuple[State, int]:
    """The oracle: all ranks in one process, one model for each; the last rank's."""
    models = [make_model() for _ in numbers]
    make = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
    optimizers = [make(model.parameters()) for model in models]
    num_steps = max(-(-number // size) for number in numbers)
    last = max(r for r, n in enumerate(numbers) if -(-n // size) == num_steps)
    for _ in range(num_epochs):
        data = [list(windows(r, n, size)) for r, n in enumerate(numbers)]
        for step in range(num_steps):
            active = [r for r in range(len(numbers)) if step < len(data[r])]
            for rank in active:
                models[rank].zero_grad()
                for batch in data[rank][step]:
                    backward(models[rank], batch)
            gradients = [[p.grad for p in models[r].parameters()] for r in active]
            share = len(numbers) if by_initial else len(active)
            for model, optimizer in zip(models, optimizers, strict=True):
                columns = zip(*gradients, strict=True)
                for parameter, column in zip(model.parameters(), columns, strict=True):
                    parameter.grad = torch.stack(column).sum(0) / share
                optimizer.step()
        for model in models:
            model.load_state_dict(models[last].state_dict())
    return state_of(models[last]), num_epochs * num_steps


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def epochs_with_adamw(numbers: Sequence[int], updates: bool) -> State:
    """Two epochs; ended ranks make the others' updates, if they are asked to."""
    rank = dist.get_rank()
    model = make_model(seed=rank)
    reducer = BucketedReducer(model, bucket_mib=SMALL_MIB)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        with reducer.join(update=optimizer.step if updates else None):
            for window in windows(rank, numbers[rank]):
                optimizer.zero_grad()
                accumulate(model, reducer, window)
                optimizer.step()
    return state_of(model)


def with_a_sharded_optimizer(numbers: Sequence[int]) -> State:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # seconds, for one test

    rank = dist.get_rank()
    model = make_model(seed=rank)
    reducer = BucketedReducer(model, bucket_mib=SMALL_MIB)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.05
    )
    with Join([reducer, optimizer]):
        for window in windows(rank, numbers[rank]):
            optimizer.zero_grad()
            accumulate(model, reducer, window)
            optimizer.step()
    return state_of(model)


def in_a_subgroup() -> list[float]:
    """Ranks 1 and 2 train with one batch and three, rank 0 alone with two."""
    rank = dist.get_rank()
    others = list(range(1, dist.get_world_size()))
    groups = [dist.new_group([0]), dist.new_group(others)]
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    reducer = BucketedReducer(model, process_group=groups[rank > 0])
    with reducer.join():
        for _ in range((2, 1, 3)[rank]):
            model.zero_grad()
            model(torch.full((1, 1), float(rank))).sum().backward()
            reducer.wait()
            with torch.no_grad():
                model.weight += model.weight.grad
    return [model.weight.item()]


def own_gradients(zeroes_before: bool) -> tuple[float | None, float]:
    """`.grad` of a weight after the block, and after one more step; rank 0 ends first.

    Inputs are 1 + rank. Rank 0 has one batch, the others two.
    """
    rank = dist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model)
    x = torch.full((1, 1), 1.0 + rank)
    with reducer.join():
        for _ in range(1 + (rank > 0)):
            if zeroes_before:
                model.zero_grad()
            model(x).sum().backward()
            reducer.wait()
            if not zeroes_before:
                model.zero_grad()
    after = model.weight.grad
    kept = None if after is None else after.item()
    model.zero_grad()
    model(x).sum().backward()
    reducer.wait()
    assert model.weight.grad is not None
    return kept, model.weight.grad.item()


def breaks(how: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    reducer, rank = BucketedReducer(model), dist.get_rank()
    x = torch.ones(1, 1)
    if how == "inside no_sync":
        with reducer.no_sync(), reducer.join():
            pass
    with reducer.join(throw_on_early_termination=how == "throw"):
        for left in reversed(range(2 if how == "open step" else 2 + rank)):
            model(x).sum().backward()
            if how == "buffers":
                reducer.broadcast_buffers()
            if how == "abandon":
                reducer.abandon()
            if how != "open step" or left:
                reducer.wait()


def joins_two(how: str) -> None:
    """Two reducers, whose buckets a backward interleaves."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2))
    one, other = BucketedReducer(model[0]), BucketedReducer(model[1])
    both = Join([one, other])
    if how == "nested":
        both = contextlib.ExitStack()
        both.enter_context(one.join())
        both.enter_context(other.join())
    with both:
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(1, 1)).sum().backward()
            one.wait()
            other.wait()


def goes_on_after_an_error() -> list[float]:
    """All ranks leave the block by an error of the user's; then steps are as before."""
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model)
    x = torch.full((1, 1), 1.0 + dist.get_rank())
    try:
        with reducer.join():
            raise KeyError("of the user's")
    except KeyError:
        pass
    model(x).sum().backward()
    reducer.wait()
    reducer.broadcast_buffers()
    assert model.weight.grad is not None
    return [model.weight.grad.item()]


def without_uneven_data(enable: bool) -> int:
    """Collectives of one step."""
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model)
    with reducer.join(enable=enable):
        model(torch.ones(1, 1)).sum().backward()
        reducer.wait()
    return reducer.num_steps
