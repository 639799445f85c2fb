"""The ways to train one step data-parallel that the benchmark compares.

Each variant has a model object of its own whose parameters share one memory: hooks do
not mix, and a sweep of thirty variants needs no thirty models. A step is forward,
backward and the averaging of gradients; there is no optimizer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlaplab import streams
from overlaplab.capture import capture_step
from overlaplab.errors import CaptureError
from overlaplab.techniques.data_parallel import (
    BucketedReducer,
    HookReducer,
    Reducer,
    SerialReducer,
)
from overlaplab.techniques.double_buffer import DoubleBufferedReducer

Batch = tuple[Tensor, ...]
NORM_RTOL = 2e-3  # bfloat16 averages differ in their last bit by the order of sums
DDP_GRAPH_WARMUP = 11  # "at least 11 DDP-enabled eager iterations" (PyTorch's notes)


@dataclass
class Variant:
    """One way to run a step."""

    name: str  # in tables and results
    settings: dict[str, Any]  # what it was built with
    step: Callable[[], object]  # runs one step
    model: nn.Module  # whose `.grad` the step fills
    averages: bool = True  # whether gradients are the mean over ranks afterwards
    micro_batches: int = 1  # backwards per step, all over the same batch
    # gives its memory and hooks back
    close: Callable[[], None] = field(default=lambda: None)


def share_parameters(model: nn.Module) -> nn.Module:
    """A copy of `model` with parameter objects of its own in the same memory."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): b for b in model.buffers()}
    twin: nn.Module = copy.deepcopy(model, memo)
    return twin


def compute(model: nn.Module, batch: Batch) -> Variant:
    """Forward and backward alone."""
    twin = share_parameters(model)

    def step() -> None:
        twin.zero_grad()
        twin(*batch).backward()

    return Variant("compute", {}, step, twin, averages=False)


def _reducer(
    name: str,
    ours: Reducer | DoubleBufferedReducer,
    twin: nn.Module,
    batch: Batch,
    micro_batches: int = 1,
    **settings: Any,
) -> Variant:
    """A step with one of our reducers, which is on `twin`."""

    def step() -> None:
        twin.zero_grad()
        with ours.no_sync():
            for _ in range(micro_batches - 1):
                twin(*batch).backward()
        twin(*batch).backward()
        ours.wait()

    return Variant(
        name,
        settings,
        step,
        twin,
        micro_batches=micro_batches,
        close=ours.remove,
    )


def bucketed(
    model: nn.Module,
    batch: Batch,
    mib: float | None = None,
    group: dist.ProcessGroup | None = None,
    micro_batches: int = 1,
) -> Variant:
    """Our reducer; `group` is for captured steps, which keep a communicator."""
    twin = share_parameters(model)
    ours = BucketedReducer(twin, bucket_mib=mib, process_group=group)
    name = f"ours {mib:g}" if mib else "ours default"
    return _reducer(name, ours, twin, batch, micro_batches, bucket_mib=mib)


def delayed(model: nn.Module, batch: Batch, mib: float | None = None) -> Variant:
    """Our reducer that gives each average one step late."""
    twin = share_parameters(model)
    ours = DoubleBufferedReducer(twin, bucket_mib=mib)
    name = f"delayed {mib:g}" if mib else "delayed default"
    return _reducer(name, ours, twin, batch, bucket_mib=mib)


def hooks(model: nn.Module, batch: Batch) -> Variant:
    twin = share_parameters(model)
    return _reducer("per parameter", HookReducer(twin), twin, batch)


def serial(model: nn.Module, batch: Batch) -> Variant:
    twin = share_parameters(model)
    return _reducer("serial", SerialReducer(twin), twin, batch)


def wrap_in_ddp(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    """On this rank's device."""
    on_cuda = next(module.parameters()).is_cuda
    ids = [streams.device().index] if on_cuda else None
    return DistributedDataParallel(module, device_ids=ids, **settings)


def ddp(
    model: nn.Module,
    batch: Batch,
    *,
    bucket_cap_mb: float | None = None,
    views: bool = False,
    static_graph: bool = False,
    zero: bool = False,
    group: dist.ProcessGroup | None = None,
    micro_batches: int = 1,
) -> Variant:
    """PyTorch's DistributedDataParallel.

    With `views` the gradients live in its buckets; `zero` then clears them in place
    (no copy into the bucket, one addition a gradient) instead of dropping them.
    """
    twin = share_parameters(model)
    settings = {
        "bucket_cap_mb": bucket_cap_mb,
        "gradient_as_bucket_view": views,
        "static_graph": static_graph,
    }
    wrapped = wrap_in_ddp(twin, process_group=group, **settings)

    def step() -> None:
        twin.zero_grad(set_to_none=not zero)
        with wrapped.no_sync():
            for _ in range(micro_batches - 1):
                wrapped(*batch).backward()
        wrapped(*batch).backward()

    settings["set_to_none"] = not zero
    name = f"ddp {bucket_cap_mb:g}" if bucket_cap_mb else "ddp default"
    name += " views" * views + " static" * static_graph + " zero" * zero
    return Variant(name, settings, step, twin, micro_batches=micro_batches)


def captured(make: Callable[[], Variant], *, num_warmup: int = 3) -> Variant:
    """The step of another variant as one CUDA graph.

    Raises:
        CaptureError: it cannot be.
    """
    if streams.device().type != "cuda":
        raise CaptureError("a CUDA graph needs CUDA")
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):  # DDP must be built off the default stream
        variant = make()
    streams.current_stream().wait_stream(side)
    step = capture_step(variant.step, num_warmup=num_warmup)
    while not step.captured:
        step()

    def close() -> None:
        step.release()
        variant.close()

    return replace(variant, name=f"{variant.name} captured", step=step, close=close)


def all_reduce_alone(model: nn.Module) -> Callable[[], None]:
    """One coalesced all-reduce of as many bytes as the gradients."""
    grads = [torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    on_cuda = grads[0].is_cuda
    op = dist.ReduceOp.AVG if on_cuda else dist.ReduceOp.SUM
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = True
    group = dist.group.WORLD
    assert group is not None

    def step() -> None:
        group.allreduce_coalesced(grads, options).wait()

    return step


def gradient_norm(model: nn.Module) -> float:
    """Root of the sum of squares of all gradients, summed in float64."""
    squares = [
        p.grad.float().square().sum(dtype=torch.float64)
        for p in model.parameters()
        if p.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt())


def reference_norm(model: nn.Module, batch: Batch) -> float:
    """Of gradients averaged by a plain all-reduce each."""
    variant = compute(model, batch)
    variant.step()
    for parameter in variant.model.parameters():
        assert parameter.grad is not None
        total = parameter.grad.float()
        dist.all_reduce(total)
        parameter.grad.copy_(total / dist.get_world_size())
    return gradient_norm(variant.model)


def check_gradients(variant: Variant, expected: float) -> None:
    """Right first: what a variant's step has left in `.grad`, on every rank.

    Args:
        expected: the norm for one micro-batch, of `reference_norm`.

    Raises:
        AssertionError: ranks differ, or it is another norm.
    """
    norm = gradient_norm(variant.model)
    both = torch.tensor([norm, -norm], dtype=torch.float64, device=streams.device())
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if both[0].item() != -both[1].item():
        raise AssertionError(
            f"{variant.name}: ranks have different gradients (norms from "
            f"{-both[1].item()!r} to {both[0].item()!r})"
        )
    expected *= variant.micro_batches
    if not math.isclose(norm, expected, rel_tol=NORM_RTOL * variant.micro_batches):
        raise AssertionError(
            f"{variant.name}: gradient norm {norm!r}, a plain all-reduce gives "
            f"{expected!r}"
        )
