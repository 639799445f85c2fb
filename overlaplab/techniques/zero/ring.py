"""Shards, and the ring of buffers into which units are gathered.

Parameters are views of their unit's slot for good: a gather fills the slot, and they
have values; another unit's gather fills it, and they have not. Nothing is allocated,
copied or resized in a step. What autograd saved of a parameter is a view of the slot,
too, so before a unit's backward the same bytes must be in the same slot again; a gather
writes below autograd, which keeps no version of a slot.

Knows neither hooks nor plans: who may overwrite what is decided by its caller.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.streams import stream_of
from overlaplab.techniques.model_facts import ParameterInfo, as_real
from overlaplab.techniques.zero.memory import Row, plan_rows, slot_bytes
from overlaplab.techniques.zero.units import Unit
from overlaplab.torch_versions import all_gather_single


class ShardedRow:
    """One row of a unit on this rank.

    Args:
        row: the plan of it; its parameters still have their full values.
        rank: of the group that shares it.
        name: of the unit.

    Attributes:
        shard: this rank's part, in the parameters' own dtype.
        sent: what is gathered: `shard` itself, or a copy in the dtype that travels.
        pieces: of each parameter, a Parameter that is a view of `shard`, flat, maybe
            empty: what optimizers update.
        gradient: as `shard`, None for a row that never trained.
        full: the whole row in its slot.
    """

    full: Tensor

    def __init__(self, row: Row, rank: int, name: str) -> None:
        self.row = row
        self._name = name
        like = row.parameters[0].parameter
        partition = row.partition
        full = torch.zeros(partition.numel, dtype=row.dtype, device=like.device)
        for info, view in zip(row.parameters, self.views(full), strict=True):
            view.copy_(info.parameter.detach())
        size = partition.shard_numel
        self.shard = full[rank * size : (rank + 1) * size].clone()
        streams.name_tensor(self.shard, f"shard of {name}")
        self.sent = self.shard.to(row.travels_as)
        self.ranges = [piece.in_shard for piece in partition.pieces(rank)]
        self.pieces = [
            nn.Parameter(self.shard[a:b], requires_grad=info.parameter.requires_grad)
            for info, (a, b) in zip(row.parameters, self.ranges, strict=True)
        ]
        self.gradient: Tensor | None = None
        self.gradient_views: list[Tensor] = []
        if row.trains:
            self.make_gradient()

    def make_gradient(self) -> None:
        """Allocate `gradient`, and a view of it for each piece."""
        self.gradient = torch.zeros_like(self.shard)
        streams.name_tensor(self.gradient, f"gradient shard of {self._name}")
        self.gradient_views = [self.gradient[a:b] for a, b in self.ranges]

    def views(self, full: Tensor) -> list[Tensor]:
        """Each parameter inside a full row, in its own shape and memory order."""
        return [
            full[entry.offset :].as_strided(entry.shape, info.stride)
            for info, entry in zip(
                self.row.parameters, self.row.partition.entries, strict=True
            )
        ]

    @property
    def trains(self) -> bool:
        """Whether some parameter of it requires a gradient now."""
        return any(info.parameter.requires_grad for info in self.row.parameters)


class ShardedUnit:
    """A unit on this rank: its rows, and its slot of the ring.

    Args:
        index: among all units.
        unit: what it is.
        world_size, rank: of the group.
        mixed: what floating point numbers travel as; None: as they are.
    """

    slot: int

    def __init__(
        self,
        index: int,
        unit: Unit,
        world_size: int,
        rank: int,
        mixed: torch.dtype | None = None,
    ) -> None:
        self.index = index
        self.name = unit.name
        self.module = unit.module
        self.parameters: tuple[ParameterInfo, ...] = unit.parameters
        self.rows = [
            ShardedRow(row, rank, unit.name)
            for row in plan_rows(unit, world_size, mixed)
        ]
        self.full_bytes = slot_bytes([row.row for row in self.rows])

    def place(self, slot: int, buffer: Tensor) -> None:
        """Make its parameters views of `buffer`, bytes of `slot`."""
        self.slot, at = slot, 0
        for row in self.rows:
            end = at + row.row.gathered_bytes
            row.full = buffer[at:end].view(row.row.travels_as)
            at = end
            for info, view in zip(row.row.parameters, row.views(row.full), strict=True):
                info.parameter.data = view


class Ring:
    """The slots, what is in them, and the gathers in flight: one a slot.

    Args:
        units: those that share the ring.
        rest: has a slot of its own behind it; None: there is none.
        num_slots: of the ring; each fits the largest unit.
        group: the ranks.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        rest: ShardedUnit | None,
        num_slots: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._stream_key = streams.key_reader(streams.provider())
        self.num_slots = num_slots
        self._units = list(units)
        everything = [*units, *([rest] if rest else [])]
        self._rows = [row for unit in everything for row in unit.rows]
        largest = max((unit.full_bytes for unit in units), default=0)
        sizes = [largest] * num_slots + ([rest.full_bytes] if rest else [])
        device = self._rows[0].shard.device
        self._buffers = [
            torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes
        ]
        for number, buffer in enumerate(self._buffers):
            streams.name_tensor(buffer, f"ring slot {number}")
        if rest:
            streams.name_tensor(self._buffers[-1], f"gathered {rest.name}")
            rest.place(num_slots, self._buffers[-1])
        self._works: list[list[Any]] = [[] for _ in sizes]
        self._readers: list[dict[Hashable, None]] = [{} for _ in sizes]
        self.forget()

    def place(self, slots: Sequence[int]) -> None:
        """Give each unit its slot; what the ring had is gone."""
        for unit, slot in zip(self._units, slots, strict=True):
            unit.place(slot, self._buffers[slot])
        self.forget()

    def refresh(self) -> None:
        """Shards have changed: copy them into what travels, where that is another."""
        rows = [row for row in self._rows if row.sent is not row.shard]
        if rows:
            sent, shards = [row.sent for row in rows], [row.shard for row in rows]
            torch._foreach_copy_(sent, shards)

    def forget(self) -> None:
        """Shards have changed, or will: whatever is gathered is old."""
        self._inside: list[ShardedUnit | None] = [None] * len(self._buffers)

    def has(self, unit: ShardedUnit) -> bool:
        """Whether the unit's gather was the last one into its slot."""
        return self._inside[unit.slot] is unit

    def launch(self, unit: ShardedUnit) -> None:
        """Gather `unit` into its slot, behind all that computed with what is in it.

        The slot, and the shards, belong to the gather until `wait`.
        """
        slot, here = unit.slot, self._stream_key()
        if not self._readers[slot]:  # nobody waited for the one before
            self._wait(slot)
        for reader in self._readers[slot]:
            if reader != here:
                stream_of(here).wait_stream(stream_of(reader))
        self._readers[slot] = {}
        self._inside[slot] = unit
        with streams.annotate(f"gather {unit.name}"):
            self._works[slot] = [
                all_gather_single(
                    as_real(row.full),
                    as_real(row.sent),
                    group=self._group,
                    async_op=True,
                )
                for row in unit.rows
            ]

    def wait(self, unit: ShardedUnit) -> None:
        """Let the current stream wait for the unit's gather, once a stream."""
        if self._stream_key() not in self._readers[unit.slot]:
            self._wait(unit.slot)

    def drain(self) -> None:
        """Let the current stream wait for all gathers: shards may be written then."""
        for slot in range(len(self._buffers)):
            if self._stream_key() not in self._readers[slot]:
                self._wait(slot)

    def _wait(self, slot: int) -> None:
        for work in self._works[slot]:
            work.wait()
        self._readers[slot][self._stream_key()] = None
