"""What sharding costs in memory, by kind, before anything is allocated.

Counts bytes of one rank from shapes alone: works on a model on the meta device too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from overlaplab.techniques.model_facts import ParameterInfo
from overlaplab.techniques.zero.partition import Partition, plan_partition
from overlaplab.techniques.zero.units import REST, Unit, make_units


@dataclass(frozen=True, slots=True)
class Row:
    """The parameters of a unit that have one dtype and train, or do not.

    Args:
        parameters: in order, one for each entry of the partition.
        partition: how they are cut.
        dtype: theirs, of the shard and of what is reduced.
        travels_as: the dtype that is gathered and computes.
        trains: whether they required a gradient when it was planned.
    """

    parameters: tuple[ParameterInfo, ...]
    partition: Partition
    dtype: torch.dtype
    travels_as: torch.dtype
    trains: bool

    @property
    def gathered_bytes(self) -> int:
        """Of the whole row as it computes."""
        return self.partition.numel * self.travels_as.itemsize


def plan_rows(
    unit: Unit, world_size: int, mixed: torch.dtype | None = None
) -> list[Row]:
    """One flat row a dtype, and what is frozen in a row without gradients.

    Args:
        unit: whose parameters.
        world_size: number of ranks.
        mixed: what floating point numbers travel as; None: as they are.
    """
    kinds: dict[tuple[torch.dtype, bool], list[ParameterInfo]] = {}
    for info in unit.parameters:
        kind = info.parameter.dtype, info.parameter.requires_grad
        kinds.setdefault(kind, []).append(info)
    return [
        Row(
            tuple(infos),
            plan_partition(
                [(info.name, info.parameter.shape) for info in infos],
                world_size,
                dtype.itemsize,
            ),
            dtype,
            mixed if mixed is not None and dtype.is_floating_point else dtype,
            trains,
        )
        for (dtype, trains), infos in kinds.items()
    ]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, by kind.

    Args:
        shards_bytes: its part of all parameters, padding included.
        copies_bytes: of the shards in the dtype that travels, where it is another.
        ring_bytes: slots into which units are gathered.
        rest_bytes: the rest, gathered for the whole step.
        gradient_shards_bytes: its part of the gradients.
        gradient_buffers_bytes: two rows from which gradients leave.
        states_bytes: of an optimizer with two numbers per parameter, such as AdamW;
            rank 0's, which has no less than others.
        padding_bytes: of `shards_bytes`, what belongs to no parameter.
    """

    shards_bytes: int
    copies_bytes: int
    ring_bytes: int
    rest_bytes: int
    gradient_shards_bytes: int
    gradient_buffers_bytes: int
    states_bytes: int
    padding_bytes: int

    @property
    def total_bytes(self) -> int:
        """All kinds; activations and gradients on their way come on top."""
        kinds = [f.name for f in fields(self) if f.name != "padding_bytes"]
        return sum(getattr(self, name) for name in kinds)

    def __str__(self) -> str:
        rows = [
            (field.name.removesuffix("_bytes").replace("_", " "), field.name)
            for field in fields(self)
        ]
        lines = [f"{what:<18}{getattr(self, n):>16,} B" for what, n in rows[:-1]]
        lines.append(f"{'total':<18}{self.total_bytes:>16,} B")
        lines.append(f"{'(padding in shards':<18}{self.padding_bytes:>16,} B)")
        return "\n".join(lines)


def slot_bytes(rows: Sequence[Row]) -> int:
    """Of the full rows of a unit as they compute, one behind the other."""
    return sum(row.gathered_bytes for row in rows)


def plan_memory(
    model: nn.Module,
    world_size: int,
    *,
    units: Sequence[nn.Module] | None = None,
    prefetch: int = 1,
    mixed_precision: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> Memory:
    """What `Zero3` with these arguments will take, from shapes: nothing is allocated.

    Args:
        model: on any device, meta included.
        world_size: number of ranks.
        units, prefetch, mixed_precision, reshard_after_forward: as in `Zero3`.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.numel()]
    infos = [
        ParameterInfo(i, name, parameter, parameter.stride(), True)
        for i, (name, parameter) in enumerate(named)
    ]
    made = make_units(model, infos, units)
    slots = count_slots(made, prefetch, reshard_after_forward)
    return count_memory(made, world_size, slots, mixed_precision)


def count_slots(
    units: Sequence[Unit], prefetch: int, reshard_after_forward: bool
) -> int:
    """Slots of the ring: one more than the units ahead, and never more than units."""
    num_ringed = sum(unit.name != REST for unit in units)
    return min(prefetch + 1 if reshard_after_forward else num_ringed, num_ringed)


def count_memory(
    units: Sequence[Unit],
    world_size: int,
    num_slots: int,
    mixed: torch.dtype | None = None,
) -> Memory:
    """Bytes of one of `world_size` ranks.

    Args:
        units: as `make_units` gives them.
        world_size: number of ranks.
        num_slots: of the ring.
        mixed: what floating point numbers travel as.
    """
    rows = [plan_rows(unit, world_size, mixed) for unit in units]
    flat = [row for of_unit in rows for row in of_unit]
    pairs = list(zip(units, rows, strict=True))
    ring = [slot_bytes(of_unit) for unit, of_unit in pairs if unit.name != REST]
    rest = [slot_bytes(of_unit) for unit, of_unit in pairs if unit.name == REST]
    gradients = sum(row.partition.shard_bytes for row in flat if row.trains)
    states = sum(
        2 * len(piece) * row.dtype.itemsize
        for row in flat
        if row.trains
        for piece in row.partition.pieces(0)
    )
    return Memory(
        sum(row.partition.shard_bytes for row in flat),
        sum(
            row.partition.shard_numel * row.travels_as.itemsize
            for row in flat
            if row.travels_as != row.dtype
        ),
        num_slots * max(ring, default=0),
        sum(rest),
        gradients,
        2 * max((row.partition.full_bytes for row in flat if row.trains), default=0),
        states,
        sum(
            row.partition.shard_bytes - sum(map(len, row.partition.pieces(0))) * size
            for row in flat
            for size in [row.dtype.itemsize]
        ),
    )
