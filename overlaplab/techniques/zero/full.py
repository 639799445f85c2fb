"""Full values out of shards and into them: state dicts, and the model as it was.

Collective: every rank calls. Uses memory of its own, one row after another, so it may
run at any time between a step's collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from overlaplab.techniques.model_facts import ParameterInfo, as_real
from overlaplab.techniques.zero.differences import (
    differing_tensors,
    raise_differences,
)
from overlaplab.techniques.zero.ring import ShardedUnit
from overlaplab.torch_versions import all_gather_single


def full_values(
    units: Sequence[ShardedUnit], group: dist.ProcessGroup
) -> Iterator[tuple[ParameterInfo, Tensor]]:
    """Each parameter and its full value in memory of its own, row after row."""
    for row in (row for unit in units for row in unit.rows):
        full = torch.empty(
            row.row.partition.numel, dtype=row.shard.dtype, device=row.shard.device
        )
        work = all_gather_single(
            as_real(full), as_real(row.shard), group=group, async_op=True
        )
        work.wait()
        for info, view in zip(row.row.parameters, row.views(full), strict=True):
            yield info, view.clone()


def full_state(
    model: nn.Module,
    units: Sequence[ShardedUnit],
    group: dist.ProcessGroup,
    device: torch.device | str | None,
) -> dict[str, Any]:
    """The model's state dict, names and order as the model has them.

    Args:
        model: sharded, its state dict not refused.
        units: of it.
        group: the ranks.
        device: where its tensors go, one after another; None: where they are.
    """
    with torch.no_grad():
        full = {
            id(info.parameter): value if device is None else value.to(device)
            for info, value in full_values(units, group)
        }
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) in full:
            state[name] = full[id(value)]
        elif isinstance(value, Tensor):
            kept = value.detach().clone()
            state[name] = kept if device is None else kept.to(device)
    return dict(state)


def load_full(
    model: nn.Module,
    units: Sequence[ShardedUnit],
    group: dist.ProcessGroup,
    state: Mapping[str, Any] | None,
) -> None:
    """Scatter rank 0's full values, row after row.

    Args:
        model: sharded, its state dict not refused.
        units: of it.
        group: the ranks.
        state: on rank 0; that of other ranks is ignored.

    Raises:
        ValueError: names or shapes differ, on every rank.
    """
    source, is_source = dist.get_global_rank(group, 0), dist.get_rank(group) == 0
    state = dict(state or {}) if is_source else {}
    mine = model.state_dict(keep_vars=True)
    told: list[Any] = [list(differing_tensors(state, mine, "the state dict")), None]
    if is_source and not told[0]:
        sharded = {id(info.parameter) for unit in units for info in unit.parameters}
        others = {n: state[n] for n, v in mine.items() if id(v) not in sharded}
        told[1] = tree_map_only(Tensor, Tensor.cpu, others)
    dist.broadcast_object_list(told, source, group=group)
    problems, others = told
    if problems:
        raise_differences("the state dict of rank 0", problems)
    for row in (row for unit in units for row in unit.rows):
        shard, parts = as_real(row.shard), None
        if is_source:
            full = torch.zeros(
                row.row.partition.numel, dtype=row.shard.dtype, device=row.shard.device
            )
            for info, view in zip(row.row.parameters, row.views(full), strict=True):
                view.copy_(state[info.name])
            parts = list(as_real(full).chunk(dist.get_world_size(group)))
        dist.scatter(shard, parts, source, group=group)
    model.load_state_dict(others, strict=False)


def give_back(units: Sequence[ShardedUnit], group: dist.ProcessGroup) -> None:
    """Give every parameter its full value, in memory of its own."""
    for info, value in full_values(units, group):
        info.parameter.data = value
