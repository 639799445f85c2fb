"""The ways to train a whole step that the benchmark of `ol.Zero3` compares.

A step is forward, backward, averages, fused AdamW, and gradients set to None. Each way
takes a model of its own and changes it for good; it is alone on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlaplab import streams
from overlaplab.bench.variants import wrap_in_ddp
from overlaplab.capture import CapturedStep, capture_step
from overlaplab.models import Transformer
from overlaplab.techniques.groups import job_group
from overlaplab.techniques.zero import Memory, Zero3
from overlaplab.torch_versions import reduce_scatter_single

LEARNING_RATE = 1e-4
DDP_SETTINGS: Mapping[str, Any] = {
    "bucket_cap_mb": 100,
    "gradient_as_bucket_view": True,
    "static_graph": True,
}
CAPTURE_WARMUP = 3  # eager steps, as `capture_step` takes by default


@dataclass
class Training:
    """One way to train a model.

    Args:
        forward: of (tokens, targets); returns the loss.
        parameters: what the optimizer updates.
        wait: behind the backward, for the averages.
        sharded: whether each rank has a part of the gradients.
        summary: of memory, where the technique says it.
        captured: `step` is one CUDA graph, for the shape that it was called with last.
    """

    forward: Callable[..., Tensor]
    parameters: list[nn.Parameter]
    wait: Callable[[], object] = lambda: None
    sharded: bool = True
    summary: Memory | None = None
    captured: bool = False

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LEARNING_RATE, fused=True, capturable=self.captured
        )
        self._graph: CapturedStep[[tuple[Tensor, ...]], None] | None = None
        self._shape: torch.Size | None = None

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        """Forward and backward; the averages are in `.grad`."""
        loss: Any = self.forward(*batch)
        loss.backward()
        self.wait()

    def update(self) -> None:
        """The optimizer's step; drops the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: tuple[Tensor, ...]) -> None:
        if not self.captured:
            self._eager_step(batch)
            return
        if self._graph is None or batch[0].shape != self._shape:
            self.close()
            self._shape = batch[0].shape
            self._graph = capture_step(self._eager_step, num_warmup=CAPTURE_WARMUP)
        self._graph(batch)

    def _eager_step(self, batch: tuple[Tensor, ...]) -> None:
        self.backward(batch)
        self.update()

    def close(self) -> None:
        """Let go of the graph, before its communicators end."""
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def gradient_norm(self) -> float:
        """Of the whole averaged gradient, between `backward` and `update`. Collective.

        Each element counts once, in float64; the same on all ranks.
        """
        total = torch.zeros((), dtype=torch.float64, device=streams.device())
        for parameter in self.parameters:
            if parameter.grad is not None:
                mine = _local(parameter.grad)
                total += mine.float().square().sum(dtype=torch.float64)
        if self.sharded:
            dist.all_reduce(total)
        return float(total.sqrt())

    def states_bytes(self) -> int:
        """Of the optimizer, on this rank."""
        states = self.optimizer.state.values()
        return sum(_local(value).nbytes for of in states for value in of.values())


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ddp(model: Transformer) -> Training:
    """Everything on every rank: DistributedDataParallel, tuned."""
    wrapped = wrap_in_ddp(model, **DDP_SETTINGS)
    return Training(wrapped, list(model.parameters()), sharded=False)


def fsdp2(
    model: Transformer,
    *,
    prefetch: int = 0,
    ends: bool = False,
    two_groups: bool = False,
    reshard_after_forward: bool = True,
    captured: bool = False,
) -> Training:
    """PyTorch's `fully_shard` of each block and of the rest.

    Args:
        model: the whole.
        prefetch: units ahead that are gathered explicitly; 0: as FSDP2 does itself.
        ends: embedding and head are units, too, and no part of the rest.
        two_groups: reduce-scatters have a communicator of their own.
        reshard_after_forward: False: weights stay until their backward.
        captured: the step is one CUDA graph.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(streams.device().type, (dist.get_world_size(),))
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    units = blocks
    if ends:
        # The last one and the root keep weights that their backward needs at once.
        fully_shard(model.embedding, mesh=mesh)
        last = [model.norm, model.head]
        fully_shard(last, mesh=mesh, reshard_after_forward=False)
        units = [model.embedding, *blocks, model.norm]
    root: Any = fully_shard(model, mesh=mesh)
    if prefetch:
        for number, module in enumerate([root, *units]):
            module.set_modules_to_forward_prefetch(units[number : number + prefetch])
        back = units[::-1]
        for number, module in enumerate([root, *back]):
            module.set_modules_to_backward_prefetch(back[number : number + prefetch])
    if two_groups:
        # 2.13 has `set_separate_reduce_scatter_group`; 2.11 has this.
        comm = ScatterOn(job_group("fsdp2 reduce-scatter"))
        for module in [root, *units]:
            module.set_custom_reduce_scatter(comm)
    return Training(root, list(model.parameters()), captured=captured)


class ScatterOn:
    """FSDP2's reduce-scatter on another group of the same ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Any, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=streams.device())

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=self._group, async_op=async_op
        )


def ours(model: Transformer, *, captured: bool = False, **settings: Any) -> Training:
    """`ol.Zero3`; `captured`: the step is one CUDA graph."""
    zero = Zero3(model, **settings)
    return Training(
        model,
        list(zero.shards()),
        wait=zero.wait,
        summary=zero.summary(),
        captured=captured,
    )


WAYS: Mapping[str, Callable[[Transformer], Training]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "ours": ours,
    "fsdp2 prefetch 1": partial(fsdp2, prefetch=1),
    "fsdp2 prefetch 2": partial(fsdp2, prefetch=2),
    "ours prefetch 2": partial(ours, prefetch=2),
    "fsdp2 prefetch 2, two groups": partial(fsdp2, prefetch=2, two_groups=True),
    "fsdp2 prefetch 2, ends": partial(fsdp2, prefetch=2, ends=True),
    "fsdp2 kept": partial(fsdp2, reshard_after_forward=False),
    "ours kept": partial(ours, reshard_after_forward=False),
    "ours captured": partial(ours, captured=True),
    "ours kept, captured": partial(ours, reshard_after_forward=False, captured=True),
    "fsdp2 prefetch 2, captured": partial(fsdp2, prefetch=2, captured=True),
}


def settings_of(way: str) -> dict[str, Any]:
    """What a way was built with, for the results."""
    make = WAYS[way]
    if make is ddp:
        return dict(DDP_SETTINGS)
    return dict(make.keywords) if isinstance(make, partial) else {}
