"""The same fixtures and cases under FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from overlaplab import streams
from overlaplab.models.toy_nets import WIDTH, random_batch
from overlaplab.techniques.zero.units import find_blocks
from tests.techniques.zero import programs, training
from tests.techniques.zero.programs import CASES

# Fixtures that FSDP2 cannot run -> what it says.
REFUSED = {
    "zero_element": "_chunk_cat expects non-empty tensor",
    "channels_last": "FSDP does not support non-contiguous parameters yet",
}
# Where ranks have gradients of different parameters FSDP2 reduces one with another,
# unless it is told to send zeros (since 2.13); but then weight decay moves what no rank
# used, which plain training does not.
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    FIXTURES = [name for name in training.FIXTURES if name not in REFUSED]
else:
    FIXTURES = [n for n in training.FIXTURES if n not in (*REFUSED, *training.WHOLE)]


def shard_with_fsdp2(model: nn.Module, whole: bool = False) -> Any:
    """`fully_shard` of each repeated block and of the rest.

    Args:
        model: is changed.
        whole: of the model alone, whose ranks use different parameters.
    """
    mesh = init_device_mesh(streams.device().type, (dist.get_world_size(),))
    for _, block in [] if whole else list(find_blocks(model)):
        fully_shard(block, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    if whole:
        root.set_reduce_scatter_unused_params(True)
    return root


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Of what `fully_shard` sharded. Collective."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.state_dict().items()
    }


def train_case(case: str, steps: tuple[int, ...]) -> dict[int, dict[str, Tensor]]:
    """As `programs.train_case`; values after each of `steps`."""
    make, losses = CASES[case]
    torch.manual_seed(3)
    model = shard_with_fsdp2(make())
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = programs.make_optimizer(named)
    found = {}
    for step in range(max(steps)):
        for loss in losses(model, random_batch(dist.get_rank(), step, WIDTH), step):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in steps:
            found[step + 1] = full_values(model)
    return found


def train_fixture(name: str, steps: tuple[int, ...]) -> dict[int, dict[str, Tensor]]:
    """As `training.train`; values after each of `steps`."""
    model = training.make_model(name)
    root = shard_with_fsdp2(model, whole=name in training.WHOLE)
    optimizer = training.make_optimizer(root.parameters())
    found = {}
    for step in range(max(steps)):
        training.loss_of(root, name, step, [dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in steps:
            found[step + 1] = full_values(root)
    return found


def train_all(steps: tuple[int, ...]) -> dict[str, dict[int, dict[str, Tensor]]]:
    """Each case and fixture with FSDP2: values after each of `steps`."""
    found = {case: train_case(case, steps) for case in CASES}
    return found | {name: train_fixture(name, steps) for name in FIXTURES}


def train_all_with_zero3(num_steps: int) -> dict[str, dict[str, Any]]:
    """The same with Zero3."""
    cases = {
        case: programs.train_case(case, prefetch=1, num_steps=num_steps)
        for case in CASES
    }
    return cases | {name: training.train(name, (num_steps,))[0] for name in FIXTURES}
