"""Loops with gradients one step late that are refused, and what each rank runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlaplab.techniques.data_parallel import BucketedReducer
from overlaplab.techniques.double_buffer import DoubleBufferedReducer
from tests.techniques.data_parallel.misuse import average, batch, weight
from tests.techniques.double_buffer.delayed_steps import backward


def accumulates_into(kept: bool) -> None:
    """A second step on the average of the first wait, of two weights."""
    model = nn.Sequential(weight(), weight())
    reducer = DoubleBufferedReducer(model)
    for step in range(3):
        if step < 2 or not kept:
            model.zero_grad()
        backward(model, step)
        reducer.wait()


def clips_and_keeps(
    zeroed: bool, backwards: int = 3, weights: int = 2
) -> list[float | None]:
    """Averages that are clipped after the wait."""
    model = nn.Sequential(*(weight() for _ in range(weights)))
    reducer = DoubleBufferedReducer(model)
    for step in range(3):
        if zeroed:
            model.zero_grad(set_to_none=False)
        if step < backwards:
            backward(model, step)
        reducer.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped = average(model)
    reducer.flush()
    return clipped


def flushes_alone(ends: bool) -> None:
    """Rank 0 flushes, rank 1 does not."""
    model = weight()
    reducer = DoubleBufferedReducer(model)
    backward(model, 0)
    reducer.wait()
    if dist.get_rank() == 0:
        reducer.flush()
    if not ends:
        backward(model, 1)
        reducer.wait()


def waits_twice() -> None:
    model = weight()
    reducer = DoubleBufferedReducer(model)
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        reducer.wait()
    reducer.wait()


def never_waits() -> None:
    model = weight()
    reducer = DoubleBufferedReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    reducer.wait()


def runs_backward_twice() -> None:
    model = weight()
    reducer = DoubleBufferedReducer(model)
    for step in range(2):
        backward(model, step)
    reducer.wait()


def steps_before_it_waits() -> None:
    model = weight()
    reducer = DoubleBufferedReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        backward(model, step)
        if step == 1:
            optimizer.step()
        reducer.wait()


def touches(what: str) -> None:
    """`.grad` of step 1 between its backward and `wait()`."""
    model = weight()
    reducer = DoubleBufferedReducer(model)
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        if step == 1:
            if what == "replace":
                model.weight.grad = model.weight.grad / 1.0
            elif what == "free":
                model.weight.grad = None
            elif what == "zero":
                model.zero_grad(set_to_none=False)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reducer.wait()


def writes_what_travels() -> None:
    """What was in `.grad` before the wait is the reducer's until the next one."""
    model = weight()
    reducer = DoubleBufferedReducer(model)
    backward(model, 0)
    kept = model.weight.grad
    reducer.wait()
    kept.mul_(2)
    model.zero_grad()
    backward(model, 1)
    reducer.wait()


def replaces_a_parameter() -> None:
    model = nn.ModuleList([weight(), weight()])
    reducer = DoubleBufferedReducer(model)
    for step in range(2):
        sum(layer(batch(step)).sum() for layer in model).backward()
        reducer.wait()
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def in_an_open_step(call: Callable[[DoubleBufferedReducer], Any]) -> None:
    model = weight()
    reducer = DoubleBufferedReducer(model)
    backward(model, 0)
    call(reducer)


def after_remove(call: Callable[[DoubleBufferedReducer], Any]) -> None:
    model = weight()
    reducer = DoubleBufferedReducer(model)
    backward(model, 0)
    reducer.wait()
    reducer.remove()
    assert not model.weight._post_accumulate_grad_hooks and not reducer.pending
    call(reducer)


def two_reducers(late_first: bool) -> None:
    model = weight()
    first, second = DoubleBufferedReducer, BucketedReducer
    kept = (first if late_first else second)(model)
    (second if late_first else first)(model)
    del kept


def loads(state: Any) -> None:
    """A state that does not fit, over a pending average; then a flush."""
    model = weight()
    reducer = DoubleBufferedReducer(model)
    backward(model, 0)
    reducer.wait()
    with pytest.raises(ValueError) as caught:
        reducer.load_state_dict(state)
    reducer.flush()
    assert average(model) == [1.5]
    raise caught.value
