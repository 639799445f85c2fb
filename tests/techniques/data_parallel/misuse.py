"""Steps that go wrong, or nearly: what each rank runs; test_machine.py asks for more.

One scalar weight with the input 1 + rank + 10 step: its average over two ranks is 1.5,
11.5, 21.5, over three 2, 12, 22.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlaplab.techniques.data_parallel import BFloat16Wire, BucketedReducer
from tests.techniques.data_parallel.training import REDUCERS


def weight() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def batch(step: int) -> Tensor:
    return torch.full((1, 1), 1.0 + dist.get_rank() + 10 * step)


def mean(ranks: int, step: int = 0) -> float:
    """Of the weight's gradients."""
    return (1 + ranks) / 2 + 10 * step


def average(model: Any) -> Any:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def extra_forward_on_rank_0(reducer: str) -> list[float]:
    model = weight()
    reduces, seen = REDUCERS[reducer](model), []
    for step in range(3):
        model.zero_grad()
        model(batch(step)).sum().backward()
        if dist.get_rank() == 0:
            model(torch.ones(1, 1)).sum().item()  # logs, with gradients enabled
        reduces.wait()
        seen += average(model)
    return seen


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (1 / 0 if ctx.now else grad), None


class Stop(nn.Module):
    now = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Fails.apply(x, self.now)
        return found


def fails_here(failing: tuple[int, ...] | None) -> bool:
    return failing is None or dist.get_rank() in failing


def backward_that_fails(
    failing: tuple[int, ...] | None, to_none: bool, abandons: bool, reducer: str
) -> list[float]:
    """Two weights; step 1 fails between them on some ranks or all, step 2 is normal."""
    net = nn.Sequential(weight(), Stop(), weight())
    reduces = REDUCERS[reducer](net)
    for step in range(3):
        net.zero_grad(set_to_none=to_none)
        net[1].now = fails_here(failing) and step == 1
        with contextlib.suppress(ZeroDivisionError):
            net(batch(step)).sum().backward()
        if abandons and step == 1:
            reduces.abandon()
            continue
        if not net[1].now:
            reduces.wait()
    return average(net)


def checkpointed_backward(failing: tuple[int, ...] | None) -> list[float]:
    """Each weight runs a backward of its own, inside that of the net; two steps."""
    net = nn.Sequential(weight(), Stop(), weight())
    reducer = BucketedReducer(net, bucket_mib=1e-6)
    for step in range(2):
        net.zero_grad()
        net[1].now = fails_here(failing)
        x = batch(step).requires_grad_()
        for layer in net:
            x = checkpoint(layer, x, use_reentrant=True)
        with contextlib.suppress(ZeroDivisionError):
            x.sum().backward()
        reducer.wait()
    return average(net)


def trains_inside_a_backward() -> list[float]:
    """Whole steps inside the backward of a Function, which has not ended by then."""
    net = weight()
    reducer, seen = BucketedReducer(net), []

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            for step in range(2):
                net.zero_grad()
                with torch.enable_grad():
                    net(batch(step)).sum().backward()
                reducer.wait()
                seen.extend(average(net))
            return grad

    Inner.apply(torch.ones(1, requires_grad=True)).sum().backward()
    return seen


def freeze_differently() -> list[float | None]:
    """Rank r freezes layer r, if there is one, and trains on the others."""
    model = nn.ModuleList(weight() for _ in range(2))
    reducer, rank = BucketedReducer(model), dist.get_rank()
    for step in range(2):  # the second step meets again, too
        model.zero_grad()
        if rank < 2:
            model[rank].requires_grad_(False)
        model[(1 - rank) % 2](torch.full((1, 1), 10.0**rank)).sum().backward()
        reducer.wait()
        del step
    return average(model)


def unfreeze_on_rank_0() -> None:
    model = nn.ModuleList(weight() for _ in range(2))
    model[0].requires_grad_(False)
    reducer = BucketedReducer(model)
    model[0].requires_grad_(dist.get_rank() == 0)
    model[1](torch.ones(1, 1)).sum().backward()
    reducer.wait()


def freeze_and_unfreeze_on_rank_0() -> list[list[float]]:
    """Frozen there in steps 1 and 2, between the steps; then it trains again."""
    model = nn.Sequential(weight(), weight())
    reducer, seen = BucketedReducer(model), []
    for step in range(4):
        model.zero_grad()
        model[0].requires_grad_(dist.get_rank() > 0 or step not in (1, 2))
        model(batch(step)).sum().backward()
        reducer.wait()
        seen.append(average(model))
    return seen


def freeze_everywhere() -> list[int]:
    """How many parameters travel: in the plan after each step."""
    model = nn.ModuleList(weight() for _ in range(3))
    reducer, sizes = BucketedReducer(model), []
    for frozen in ((), (0,), (0, 1), (1,), ()):
        for i, layer in enumerate(model):
            layer.requires_grad_(i not in frozen)
        model.zero_grad()
        sum(layer(batch(0)).sum() for layer in model).backward()
        reducer.wait()
        right = (1 + dist.get_world_size()) / 2
        assert average(model) == [None if i in frozen else right for i in range(3)]
        sizes.append(sum(len(bucket) for bucket in reducer.plan))
    return sizes


def never_waits(reducer: str) -> None:
    model = weight()
    reduces = REDUCERS[reducer](model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    reduces.wait()


def ends_without_a_wait() -> None:
    model = weight()
    reducer = BucketedReducer(model)
    model(batch(0)).sum().backward()
    del reducer


def steps_before_it_waits(reducer: str) -> None:
    model = weight()
    reduces = REDUCERS[reducer](model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batch(0)).sum().backward()
    optimizer.step()
    reduces.wait()


def swaps_memory_before_it_waits(how: str, reducer: str) -> None:
    """Neither counts as a write of the tensor."""
    model = weight()
    reduces = REDUCERS[reducer](model)
    model(batch(0)).sum().backward()
    if how == "to":
        model.to(torch.float64)
    else:
        assert model.weight.grad is not None
        model.weight.data = model.weight.data - 0.1 * model.weight.grad
    reduces.wait()


def touches(what: str, reducer: str) -> list[float]:
    """`.grad` between the backward pass and `wait()`."""
    model = weight()
    if what == "hook":  # registered before ours

        def step_and_free(parameter: Tensor) -> None:
            parameter.data.sub_(parameter.grad)
            parameter.grad = None

        model.weight.register_post_accumulate_grad_hook(step_and_free)
    reduces = REDUCERS[reducer](model)
    model(batch(0)).sum().backward()
    if what == "replace":
        model.weight.grad = model.weight.grad / 1.0
    elif what == "free":
        model.zero_grad()
    elif what == "zero":
        model.zero_grad(set_to_none=False)
    elif what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    reduces.wait()
    return average(model)


def waits_after_remove(reducer: str) -> None:
    model = weight()
    reduces = REDUCERS[reducer](model)
    reduces.remove()
    model(batch(0)).sum().backward()
    reduces.wait()


def abandons_after_remove(reducer: str) -> None:
    reduces = REDUCERS[reducer](weight())
    reduces.remove()
    reduces.abandon()


def another_method() -> list[float]:
    """Micro-batches through another method than `forward`."""

    class Net(nn.Linear):
        def loss(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()).sum()

    model = Net(1, 1, bias=False)
    reducer = BucketedReducer(model)
    with reducer.no_sync():
        model.loss(batch(0)).backward()
    model.loss(batch(1)).backward()
    reducer.wait()
    return average(model)


def half_precision() -> list[float]:
    model = nn.Linear(1, 1, bias=False).half()
    reducer = BucketedReducer(model)
    model.weight.grad = torch.full((1, 1), 40000.0, dtype=torch.float16)
    reducer.wait()
    return average(model)


def lazily_conjugated() -> list[complex]:
    model = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    nn.init.ones_(model.weight)
    reducer = BucketedReducer(model)
    x = torch.full((1, 1), complex(1 + dist.get_rank(), 0.0))
    (model.weight.conj() * x).sum().abs().backward()
    reducer.wait()
    return average(model)


def how_many_live(reducer: str, number: int = 10) -> tuple[int, int]:
    """Models and reducers that are alive after a collection, made, used, dropped."""
    models, reducers = [], []
    for step in range(number):
        model = weight()
        reduces = REDUCERS[reducer](model)
        model(batch(step)).sum().backward()
        reduces.wait()
        models.append(weakref.ref(model.weight))
        reducers.append(weakref.ref(reduces))
        del model, reduces
    gc.collect()
    return tuple(sum(ref() is not None for ref in refs) for refs in (models, reducers))


def steps_on_a_destroyed_group() -> None:
    model = weight()
    reducer = BucketedReducer(model)
    dist.destroy_process_group()
    dist.init_process_group()
    model(batch(0)).sum().backward()
    reducer.wait()


def abandons_on_rank_0() -> None:
    model = weight()
    reducer = BucketedReducer(model)
    model(batch(0)).sum().backward()
    if dist.get_rank() == 0:
        reducer.abandon()


def abandons_after_a_cast() -> list[float]:
    """Rank 1 fails before its backward, in the first step of another plan."""
    model = nn.Sequential(weight(), weight())
    reducer = BucketedReducer(model)
    model[0].double()

    def forward() -> Tensor:
        return model[1](model[0](batch(0).double()).float())

    if dist.get_rank() == 0:
        forward().sum().backward()
    reducer.abandon()
    model.zero_grad()
    forward().sum().backward()
    reducer.wait()
    return average(model)


class Buffers(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.layer = weight()
        self.register_buffer("table", buffer)


def frozen_float8() -> list[float]:
    """A weight and a buffer of rank 0's; another weight trains."""
    model = Buffers(torch.full((2,), float(dist.get_rank())).to(torch.float8_e4m3fn))
    small = torch.full((2,), 1.0 + dist.get_rank()).to(torch.float8_e4m3fn)
    model.small = nn.Parameter(small, requires_grad=False)
    BucketedReducer(model)
    return [*model.table.float().tolist(), *model.small.float().tolist()]


def dropped_while_open() -> int:
    """Weights that are alive after their models and reducers have been dropped."""
    weights = []
    for step in range(5):
        model = weight()
        reducer = BucketedReducer(model)
        model(batch(step)).sum().backward()
        weights.append(weakref.ref(model.weight))
        del model, reducer
    gc.collect()
    return sum(ref() is not None for ref in weights)


def removed_leaves_nothing() -> tuple[int, list[float]]:
    model = weight()
    reducer = BucketedReducer(model)
    model(batch(0)).sum().backward()
    reducer.remove()
    model.zero_grad()
    model(batch(0)).sum().backward()
    return len(model.weight._post_accumulate_grad_hooks), average(model)


def bfloat16_wire(dtype: torch.dtype) -> list[Tensor]:
    """Gradients that bfloat16 holds exactly, of sizes that no world divides."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(dtype)
    reducer = BucketedReducer(model, wire=BFloat16Wire(dist.group.WORLD))
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 2.0**i * (1 + dist.get_rank()))
    reducer.wait()
    return [p.grad for p in model.parameters()]


def buffers_on_request() -> float:
    model = Buffers(torch.full((1,), float(dist.get_rank())))
    reducer = BucketedReducer(model)
    model.table.fill_(dist.get_rank() + 5.0)
    reducer.broadcast_buffers()
    return model.table.item()
