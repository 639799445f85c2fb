"""Steps with gradients one step late, as each rank runs them.

As in data_parallel/misuse.py: a scalar weight with the input 1 + rank + 10 step, so
that its average over two ranks is 1.5 in step 0, 11.5 in step 1, 21.5 in step 2.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.techniques.double_buffer import DoubleBufferedReducer
from tests.techniques.data_parallel import misuse, programs
from tests.techniques.data_parallel.misuse import Stop, average, batch, weight

Seen = list[list[float | None]]


class Flushed(DoubleBufferedReducer):
    """With a flush in every step nothing is late: it is a `BucketedReducer`."""

    def wait(self) -> None:
        super().wait()
        self.flush()


@contextlib.contextmanager
def flushed_everywhere() -> Iterator[None]:
    """The programs of `BucketedReducer` run with the other one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (misuse, programs):
            patch.setattr(module, "BucketedReducer", Flushed)
        yield


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).sum().backward()


def steps(flush_after: int | None = None) -> tuple[Seen, list[bool]]:
    """`.grad` after each wait and flush; what flush said, at the end twice."""
    model = weight()
    reducer = DoubleBufferedReducer(model)
    seen, flushes = [], []
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        reducer.wait()
        seen.append(average(model))
        if step == flush_after:
            flushes.append(reducer.flush())
            seen.append(average(model))
    for _ in range(2):
        flushes.append(reducer.flush())
        seen.append(average(model))
    return seen, flushes


def skips(ranks_of_step: list[tuple[int, ...]]) -> Seen:
    """Of each step the ranks that have no backward in it."""
    model, rank = weight(), dist.get_rank()
    reducer, seen = DoubleBufferedReducer(model), []
    for step, ranks in enumerate(ranks_of_step):
        model.zero_grad()
        if rank not in ranks:
            backward(model, step)
        reducer.wait()
        seen.append(average(model))
    reducer.flush()
    return [*seen, average(model)]


def two_micro_batches(cut_short: bool) -> Seen:
    model = weight()
    reducer, seen = DoubleBufferedReducer(model), []
    for step in range(2):
        with reducer.no_sync():
            backward(model, 2 * step)
            if cut_short:
                backward(model, 2 * step + 1)
        if not cut_short:
            backward(model, 2 * step + 1)
        reducer.wait()
        seen.append(average(model))
        model.zero_grad()
    reducer.flush()
    return [*seen, average(model)]


def a_step_that_fails(failing: tuple[int, ...], to_none: bool) -> Seen:
    """Step 1 fails between two weights on some ranks; all of them give it up."""
    net = nn.Sequential(weight(), Stop(), weight())
    reducer, seen = DoubleBufferedReducer(net, bucket_mib=1e-6), []
    for step in range(3):
        net.zero_grad(set_to_none=to_none)
        net[1].now = dist.get_rank() in failing and step == 1
        with contextlib.suppress(ZeroDivisionError):
            backward(net, step)
        if step == 1:
            reducer.abandon()
        else:
            reducer.wait()
            seen.append(average(net))
    reducer.flush()
    return [*seen, average(net)]


def freezes_everywhere() -> tuple[Seen, list[int]]:
    """Of three weights, frozen on all ranks: none, 0, 0 and 1, 1, none; plan sizes."""
    model = nn.ModuleList(weight() for _ in range(3))
    reducer = DoubleBufferedReducer(model)
    seen, sizes = [], []
    for step, frozen in enumerate(((), (0,), (0, 1), (1,), (), ())):
        for i, layer in enumerate(model):
            layer.requires_grad_(i not in frozen)
        model.zero_grad()
        sum(layer(batch(step)).sum() for layer in model).backward()
        reducer.wait()
        seen.append(average(model))
        sizes.append(sum(len(bucket) for bucket in reducer.plan))
    reducer.flush()
    return [*seen, average(model)], sizes


def freezes_on_rank_0() -> Seen:
    """Its weight 0 is frozen in steps 1 and 2: it brings 0 for it."""
    model = nn.Sequential(weight(), weight())
    reducer, seen = DoubleBufferedReducer(model), []
    for step in range(4):
        model.zero_grad()
        model[0].requires_grad_(dist.get_rank() > 0 or step not in (1, 2))
        backward(model, step)
        reducer.wait()
        seen.append(average(model))
    reducer.flush()
    return [*seen, average(model)]


def converts_between_steps() -> list[tuple[float, torch.dtype] | None]:
    model = weight()
    reducer, seen = DoubleBufferedReducer(model), []
    for step in range(3):
        model.zero_grad()
        if step == 1:
            model.double()
        model(batch(step).to(model.weight.dtype)).sum().backward()
        reducer.wait()
        grad = model.weight.grad
        seen.append(None if grad is None else (grad.item(), grad.dtype))
    reducer.remove()
    return seen


def saves_and_loads() -> tuple[dict[str, Any], Seen]:
    """The state after step 1, written to; then loaded over what step 2 left."""
    model = weight()
    reducer = DoubleBufferedReducer(model)
    assert reducer.state_dict() == {"average": None}
    seen, state = [], {}
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        reducer.wait()
        seen.append(average(model))
        if step == 1:
            state = reducer.state_dict()
            reducer.state_dict()["average"]["weight"].fill_(-1.0)
    kept = {name: t.clone() for name, t in state["average"].items()}
    reducer.load_state_dict(state)
    state["average"]["weight"].fill_(-1.0)
    reducer.flush()
    seen.append(average(model))
    reducer.load_state_dict({"average": None})
    assert not reducer.pending and not reducer.flush()
    return kept, seen


def of_any_stride() -> tuple[bool, float]:
    """An expanded gradient, which cannot be written into, and a state in between."""
    model = weight()
    model.weight = nn.Parameter(torch.ones(2, 2))
    reducer = DoubleBufferedReducer(model)
    model.weight.grad = torch.full((1, 1), 1.0 + dist.get_rank()).expand(2, 2)
    reducer.wait()
    reducer.state_dict()
    is_none = model.weight.grad is None
    reducer.flush()
    (value,) = set(model.weight.grad.flatten().tolist())
    return is_none, value


def unused_in_the_last_step() -> list[list[float | None]]:
    """Layer 1 is in step 0 alone; nothing is zeroed before the flush."""
    model = nn.Sequential(weight(), weight())
    reducer, seen = DoubleBufferedReducer(model), []
    for step in range(2):
        model.zero_grad()
        (model(batch(step)) if step == 0 else model[0](batch(step))).sum().backward()
        reducer.wait()
        seen.append(average(model))
    reducer.flush()
    return [*seen, average(model)]


def loads_other_averages(names_of_rank: list[list[str] | None]) -> list[float | None]:
    """Of two weights; rank r has r + 1 for all of its own."""
    model, rank = nn.Sequential(weight(), weight()), dist.get_rank()
    reducer, names = DoubleBufferedReducer(model), names_of_rank[rank]
    values = (
        None if names is None else {n: torch.ones(1, 1) * (rank + 1) for n in names}
    )
    reducer.load_state_dict({"average": values})
    reducer.flush()
    return average(model)


def two_models() -> list[Seen]:
    """Two reducers whose steps alternate."""
    nets = [weight(), weight()]
    reducers = [DoubleBufferedReducer(net) for net in nets]
    seen: list[Seen] = [[], []]
    for step in range(3):
        for net in nets:
            net.zero_grad()
        for i, net in enumerate(nets):
            backward(net, step + 10 * i)
        for i, reducer in enumerate(reducers):
            reducer.wait()
            seen[i].append(average(nets[i]))
    for reducer in reducers:
        reducer.remove()
    return seen


def how_many_live(number: int = 5) -> int:
    """Models, reducers and their gradients that live on, dropped in mid-flight."""
    found: list[weakref.ref[Any]] = []
    for step in range(number):
        model = weight()
        reducer = DoubleBufferedReducer(model)
        for late in range(2):
            model.zero_grad()
            backward(model, step + late)
            reducer.wait()
        found += [weakref.ref(model.weight), weakref.ref(reducer)]
        del model, reducer
    gc.collect()
    return sum(ref() is not None for ref in found)


def reduced_in_float32() -> Tensor:
    """bfloat16 gradients 256 and 1: their sum needs more than 8 bits."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    reducer = DoubleBufferedReducer(model, reduce_dtype=torch.float32)
    for _ in range(2):
        model.zero_grad()
        value = (256.0, 1.0)[dist.get_rank()]
        model.weight.grad = torch.full((1, 1), value, dtype=torch.bfloat16)
        reducer.wait()
    reducer.remove()
    assert model.weight.grad is not None
    return model.weight.grad


def says() -> str:
    net = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4, bias=False))
    reducer = DoubleBufferedReducer(net, bucket_mib=0.1)
    assert reducer.extra_bytes == 4 * 256 * (256 + 4)
    assert repr(reducer) in reducer.summary()
    return reducer.summary()


def fake_steps() -> list[bool]:
    net = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    reducer, seen = DoubleBufferedReducer(net), []
    for _ in range(2):
        net.zero_grad()
        net[0](torch.randn(8, 64)).square().mean().backward()
        reducer.wait()
        seen += [net[0].weight.grad is None, net[2].weight.grad is None]
    reducer.remove()
    return seen
