"""What the reducer tests run on every rank: one field case a function."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.models.toy_nets import TOY_NETS, WIDTH, Branches, random_batch
from overlaplab.techniques.data_parallel import BucketedReducer
from tests.techniques.data_parallel.training import REDUCERS

SMALL_MIB = 0.0005  # a few parameters of a toy net a bucket


def rank_batch(step: int = 0) -> Tensor:
    return random_batch(dist.get_rank(), step, WIDTH)


class Two(nn.Module):
    """Two layers; `use_b` says whether the second one reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.use_b = True

    def forward(self, x: Tensor) -> Tensor:
        loss = self.a(x).square().mean()
        return loss + self.b(x).square().mean() if self.use_b else loss


def grads(model: nn.Module) -> dict[str, Any]:
    return {
        n: None if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }


def presence_of_gradients(net_name: str, reducer_name: str) -> dict[str, bool]:
    """Which parameters have a gradient after one step."""
    net = TOY_NETS[net_name]
    model = net.make_model()
    reducer = REDUCERS[reducer_name](model)
    model(net.make_batch(dist.get_rank(), 0)).backward()
    reducer.wait()
    return {n: p.grad is not None for n, p in model.named_parameters()}


def no_backward_on_rank_0() -> dict[str, Any]:
    model = Two()
    reducer = BucketedReducer(model, bucket_mib=SMALL_MIB)
    if dist.get_rank():
        model(rank_batch()).backward()
    reducer.wait()
    return grads(model)


def two_backwards_on_one_graph(wait_between: bool) -> float:
    """A11: local gradients 1 then 2 on rank 0, 3 then 4 on rank 1, 5 then 6."""
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model)
    first = 2.0 * dist.get_rank() + 1
    second = first + 1
    out = model(torch.ones(1, 1))
    out.backward(torch.tensor([[first]]), retain_graph=True)
    if wait_between:
        reducer.wait()
    out.backward(torch.tensor([[second]]))
    reducer.wait()
    assert model.weight.grad is not None
    return model.weight.grad.item()


def two_forwards_and_backwards(window: bool) -> float:
    """As above with a forward of its own before each backward, one wait at the end."""
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model)
    first = 2.0 * dist.get_rank() + 1
    with reducer.no_sync() if window else contextlib.nullcontext():
        model(torch.full((1, 1), first)).sum().backward()
    model(torch.full((1, 1), first + 1)).sum().backward()
    reducer.wait()
    assert model.weight.grad is not None
    return model.weight.grad.item()


def create_graph() -> float:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(3.0)
    reducer = BucketedReducer(model)
    x = torch.full((1, 1), dist.get_rank() + 1.0)
    (model(x) ** 2).sum().backward(create_graph=True)
    reducer.wait()
    assert model.weight.grad is not None
    return model.weight.grad.item()


def freeze_and_unfreeze(reducer_name: str) -> list[dict[str, Any]]:
    """A06: `a` is frozen in steps 1 and 2 of 4; its stale gradient is kept."""
    model = Two()
    reducer = REDUCERS[reducer_name](model)
    seen = []
    for step in range(4):
        model.a.requires_grad_(step not in (1, 2))
        for parameter in model.b.parameters():
            parameter.grad = None
        if step in (0, 3):
            model.a.zero_grad()
        if step == 1:  # what a reducer must neither send nor overwrite
            model.a.weight.grad = torch.full((WIDTH, WIDTH), float(dist.get_rank()))
        model(rank_batch(step)).backward()
        reducer.wait()
        seen.append(grads(model))
    return seen


def unfreeze_what_was_frozen_at_construction() -> dict[str, Any]:
    model = Two()
    model.a.requires_grad_(False)
    reducer = BucketedReducer(model)
    model(rank_batch()).backward()
    reducer.wait()
    model.zero_grad()
    model.a.requires_grad_(True)
    model(rank_batch()).backward()
    reducer.wait()
    return grads(model)


def strange_strides() -> dict[str, Any]:
    """A07: transposed, expanded and rank-dependent layouts of `.grad`."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Conv2d(4, 8, 1))
    if dist.get_rank() == 1:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reducer = BucketedReducer(model)
    value = dist.get_rank() + 1.0
    first, second, conv = model[0].weight, model[1].weight, model[2].weight
    first.grad = (torch.arange(24.0).reshape(4, 6) * value).t()
    second.grad = torch.full((1, 1), value).expand(4, 6)
    conv.grad = (torch.arange(32.0).reshape(8, 4, 1, 1) * value).contiguous(
        memory_format=torch.channels_last
    )
    kept = first.grad
    reducer.wait()
    same_tensor = first.grad is kept and kept.stride() == (1, 6)
    return {"same": same_tensor, "first": first.grad, "second": second.grad} | {
        "conv": conv.grad,
        "bias is none": model[0].bias.grad is None,
    }


def accumulated_in_other_dtype() -> dict[str, Any]:
    """A17: bfloat16 parameters reduced in float32, one used in the second half only."""
    model = Two().to(torch.bfloat16)
    reducer = BucketedReducer(model, reduce_dtype=torch.float32, max_in_flight=1)
    model.use_b = False
    with reducer.no_sync():
        model(rank_batch(0).bfloat16()).backward()
    model.use_b = True
    model(rank_batch(1).bfloat16()).backward()
    reducer.wait()
    return grads(model)


def reduce_exactly(dtype: torch.dtype | None) -> float:
    """Gradients 256, 1, 1: their bfloat16 sum is 256, their float32 sum is not."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    reducer = BucketedReducer(model, reduce_dtype=dtype)
    model.weight.grad = torch.full(
        (1, 1), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16
    )
    reducer.wait()
    return float(model.weight.grad)


def complex_gradients(reduce_dtype: torch.dtype | None) -> Tensor:
    model = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    reducer = BucketedReducer(model, reduce_dtype=reduce_dtype)
    model.weight.grad = torch.full((2, 2), complex(dist.get_rank(), 2.0))
    reducer.wait()
    return model.weight.grad


def replace_a_parameter() -> None:
    model = Two()
    reducer = BucketedReducer(model)
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())
    model(rank_batch()).backward()
    reducer.wait()


def load_other_parameters() -> None:
    model = Two()
    reducer = BucketedReducer(model)
    model.load_state_dict(Two().state_dict(), assign=True)
    model(rank_batch()).backward()
    reducer.wait()


def gradients_of_autograd_grad() -> tuple[float, float]:
    """Of a weight with the input 1 + rank: never in `.grad`, then by a usual step."""
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model)
    x = torch.full((1, 1), 1.0 + dist.get_rank())
    (local,) = torch.autograd.grad(model(x).sum(), [model.weight])
    model(x).sum().backward()
    reducer.wait()
    assert model.weight.grad is not None
    return local.item(), model.weight.grad.item()


def replace_and_call_the_parts() -> None:
    model = Two()
    reducer = BucketedReducer(model)
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())
    model.b(model.a(rank_batch())).sum().backward()  # never the model's own forward
    reducer.wait()


def copy_model() -> tuple[float, list[float]]:
    """Of the model and of its copies: the gradient of an input of 1 + rank."""
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    x = torch.ones(1, 1) * (1 + dist.get_rank())
    for net in (model, *copies):
        net(x).sum().backward()
    reducer.wait()
    return model.weight.grad.item(), [net.weight.grad.item() for net in copies]


def reducer_after_reducer() -> float:
    model = nn.Linear(1, 1, bias=False)
    first = BucketedReducer(model)
    first.remove()
    second = BucketedReducer(model)
    model(torch.ones(1, 1) * (1 + dist.get_rank())).sum().backward()
    second.wait()
    return model.weight.grad.item()


def replace_a_module() -> None:
    model = Two()
    reducer = BucketedReducer(model)
    model.b = nn.Linear(WIDTH, WIDTH)
    model(rank_batch()).backward()
    reducer.wait()


def different_models() -> None:
    BucketedReducer(nn.Linear(4, 4 + dist.get_rank()))


def convert_after_construction() -> dict[str, Any]:
    model = Two()
    reducer = BucketedReducer(model)
    model.double()
    model(rank_batch().double()).backward()
    reducer.wait()
    return grads(model)


def zero_elements_round_trip() -> tuple[Any, bool]:
    net = TOY_NETS["zero_element"]
    model = net.make_model()
    reducer = BucketedReducer(model)
    model(net.make_batch(dist.get_rank(), 0)).backward()
    reducer.wait()
    state = model.state_dict()
    net.make_model().load_state_dict(state)
    names = [name for bucket in reducer.plan for name in bucket.names]
    return tuple(state["empty.weight"].shape), "empty.weight" in names


def order_of_launches(net_name: str) -> list[str]:
    net = TOY_NETS[net_name]
    model = net.make_model()
    reducer = BucketedReducer(model, bucket_mib=0.00001)
    sent: list[str] = []
    launch = reducer._steps.arrivals._on_turn_ref()
    assert launch is not None

    def spy(bucket: int) -> None:
        sent.append(" ".join(reducer.plan[bucket].names))
        launch(bucket)

    reducer._steps.arrivals._on_turn_ref = lambda: spy  # type: ignore[assignment]
    model(net.make_batch(dist.get_rank(), 0)).backward()
    reducer.wait()
    return sent


def branch_batch(rank: int) -> Tensor:
    """Of another branch first on rank 0 than on the others."""
    batch = random_batch(rank, 0, WIDTH)
    batch[0, 0] = -1.0 if rank else 1.0
    return batch


def branch_gradients() -> dict[str, Any]:
    model = Branches()
    reducer = BucketedReducer(model, bucket_mib=0.00001)
    model(branch_batch(dist.get_rank())).backward()
    reducer.wait()
    return grads(model)


def removed() -> dict[str, Any]:
    """After remove() gradients stay local and no hook is left."""
    model = Two()
    reducer = BucketedReducer(model, bucket_mib=SMALL_MIB)
    model(rank_batch()).backward()
    reducer.remove()
    model.zero_grad()
    model(rank_batch()).backward()
    assert not model._forward_pre_hooks
    return grads(model)


def broadcast_values() -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Conv2d(4, 8, 1))
    if dist.get_rank() == 1:
        model[2].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    nn.init.normal_(model[1].running_mean)
    BucketedReducer(model)
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


def evaluation_between() -> dict[str, Any]:
    """A forward without gradients between backward and wait changes nothing."""
    model = Two()
    reducer = BucketedReducer(model, bucket_mib=SMALL_MIB)
    model(rank_batch()).backward()
    with torch.no_grad():
        model(rank_batch(1))
    reducer.wait()
    return grads(model)


class ScaledByABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(1, 1, bias=False)
        self.register_buffer("b", torch.ones(1))

    def forward(self, z: Tensor) -> Tensor:
        return (self.lin(z) * self.b).sum()


def buffers_between_two_forwards(between: bool) -> float:
    """A14: each rank has set the buffer to 1 + rank; two forwards, one backward."""
    model = ScaledByABuffer()
    reducer = BucketedReducer(model)
    model.b.fill_(1.0 + dist.get_rank())
    if not between:
        reducer.broadcast_buffers()
    x = torch.full((1, 1), 1.0 + dist.get_rank())
    loss = model(x)
    if between:
        reducer.broadcast_buffers()
    (loss + model(x)).backward()
    reducer.wait()
    assert model.lin.weight.grad is not None
    return model.lin.weight.grad.item()


def in_a_subgroup() -> float:
    """The last rank has a group of its own."""
    last = dist.get_world_size() - 1
    groups = [dist.new_group(list(range(last))), dist.new_group([last])]
    group = groups[dist.get_rank() == last]
    model = nn.Linear(1, 1, bias=False)
    reducer = BucketedReducer(model, process_group=group)
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    reducer.wait()
    assert model.weight.grad is not None
    return model.weight.grad.item()
