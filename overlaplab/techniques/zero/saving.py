"""Full values out of shards: state dicts, and the model as it was.

Collective: every rank calls, and every rank gets all. Uses memory of its own, so it may
run at any time between a step's collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.techniques.model_facts import ParameterInfo, as_real
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


def give_back(units: Sequence[ShardedUnit], group: dist.ProcessGroup) -> None:
    """Give every parameter its full value, in memory of its own."""
    for info, value in full_values(units, group):
        info.parameter.data = value
