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
from overlaplab.techniques.zero.plan import plan_slots
from overlaplab.techniques.zero.units import Unit, make_units


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
        """Of the whole row as it computes, and of its gradients as they are made."""
        return self.partition.numel * self.travels_as.itemsize

    @property
    def slot_bytes(self) -> int:
        """Of its place in a slot, from which its gradients leave as well."""
        return max(self.gathered_bytes, self.trains * self.partition.full_bytes)


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
    """Bytes of one rank, by kind, when a step holds most of them.

    Args:
        shards_bytes: its part of all parameters, padding included.
        ring_bytes: slots into which units are gathered, and from which gradients leave.
        rest_bytes: the rest, gathered for the whole step.
        gradient_shards_bytes: its part of the gradients.
        gradients_bytes: what full gradients of a unit take on top of that.
        states_bytes: of an optimizer with two numbers per parameter, such as AdamW;
            rank 0's, which has no less than others.
        padding_bytes: of `shards_bytes`, what belongs to no parameter.
    """

    shards_bytes: int
    ring_bytes: int
    rest_bytes: int
    gradient_shards_bytes: int
    gradients_bytes: int
    states_bytes: int
    padding_bytes: int

    @property
    def total_bytes(self) -> int:
        """All kinds; activations come on top."""
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
    """Of the rows of a unit, one behind the other."""
    return sum(row.slot_bytes for row in rows)


def slot_sizes(units: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Bytes of each slot: as many as the largest of the units that share it needs.

    Args:
        units: bytes of each.
        slots: the slot of each.
    """
    sizes = [0] * (max(slots) + 1)
    for num_bytes, slot in zip(units, slots, strict=True):
        sizes[slot] = max(sizes[slot], num_bytes)
    return sizes


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
    num_ringed = sum(not unit.is_rest for unit in units)
    return min(prefetch + 1 if reshard_after_forward else num_ringed, num_ringed)


def count_memory(
    units: Sequence[Unit],
    world_size: int,
    num_slots: int,
    mixed: torch.dtype | None = None,
) -> Memory:
    """Bytes of one of `world_size` ranks.

    Args:
        units: as `make_units` gives them; the model uses them in this order.
        world_size: number of ranks.
        num_slots: of the ring.
        mixed: what floating point numbers travel as.
    """
    rows = {unit: plan_rows(unit, world_size, mixed) for unit in units}
    flat = [row for of_unit in rows.values() for row in of_unit]
    ring = [unit for unit in units if not unit.is_rest]
    slots = plan_slots((), len(ring), num_slots) if ring else (0,)
    sizes = slot_sizes([slot_bytes(rows[unit]) for unit in ring] or [0], slots)
    rest = sum(slot_bytes(rows[unit]) for unit in units if unit.is_rest)
    trained = [row for row in flat if row.trains]
    gradients = sum(row.partition.shard_bytes for row in trained)
    kept = [(row, sum(map(len, row.partition.pieces(0)))) for row in flat]
    return Memory(
        sum(row.partition.shard_bytes for row in flat),
        sum(sizes),
        rest,
        gradients,
        _most_gradients(rows, copies=num_slots == 1) - gradients,
        sum(2 * numel * row.dtype.itemsize for row, numel in kept if row.trains),
        sum((r.partition.shard_numel - numel) * r.dtype.itemsize for r, numel in kept),
    )


def _most_gradients(rows: dict[Unit, list[Row]], copies: bool) -> int:
    """The most bytes that gradients take, full ones and shards, the last unit first.

    Those of embeddings and of the rest stay full to the step's end. With `copies` the
    others leave from memory of their own.
    """
    full = {u: sum(r.gathered_bytes for r in rows[u] if r.trains) for u in rows}
    late = [unit for unit in rows if unit.is_late]
    most, shards = 0, 0
    waiting = sum(full[unit] for unit in late if unit.is_rest)
    for unit in [*(u for u in reversed(rows) if u not in late), *reversed(late)]:
        trained = [row.partition for row in rows[unit] if row.trains]
        if unit in late:
            waiting = max(waiting, sum(full[u] for u in late))
            most = max(most, shards + waiting)
        else:
            own = full[unit] + copies * sum(part.full_bytes for part in trained)
            most = max(most, shards + waiting + own)
        shards += sum(part.shard_bytes for part in trained)
        most = max(most, shards + waiting * (unit not in late))
    return most
