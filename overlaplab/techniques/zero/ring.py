"""Shards, and the ring of slots into which units are gathered.

Parameters are views of their unit's slot for good: a gather fills the slot, and they
have values; another unit's gather fills it, and they have not. No weight is allocated,
copied or resized in a step. What autograd saved of a parameter is a view of the slot,
too, so before a unit's backward the same bytes must be in the same slot again; a gather
writes below autograd, which keeps no version of a slot.

A unit's gradients leave from its slot as well: once its backward is over nobody reads
the weights there. A gather into that slot is behind the scatter, not behind what
computes meanwhile.

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
from overlaplab.techniques.zero.memory import Row, plan_rows, slot_bytes, slot_sizes
from overlaplab.techniques.zero.units import Unit
from overlaplab.torch_versions import launch_all_gather


class ShardedRow:
    """One row of a unit on this rank.

    Args:
        row: the plan of it; its parameters still have their full values.
        rank: of the group that shares it.
        name: of the unit.

    Attributes:
        shard: this rank's part, in the parameters' own dtype.
        pieces: of each parameter, a Parameter that is a view of `shard`, flat, maybe
            empty: what optimizers update.
        full: the whole row in its slot, as it is gathered and computes.
        sent: what is gathered of this rank: `shard`, or a cast of it inside `full`.
        is_cast: it is the latter.
        leaving: the whole row in its slot, as gradients leave; None: it never trained.
        leaving_views: each parameter's gradient in `leaving`.
    """

    full: Tensor
    sent: Tensor
    leaving: Tensor | None
    leaving_views: list[Tensor]

    def __init__(self, row: Row, rank: int, name: str) -> None:
        self.row = row
        like = row.parameters[0].parameter
        partition = row.partition
        full = torch.zeros(partition.numel, dtype=row.dtype, device=like.device)
        for info, view in zip(row.parameters, self.views(full), strict=True):
            view.copy_(info.parameter.detach())
        size = partition.shard_numel
        self._begin, self._end = rank * size, (rank + 1) * size
        self.shard = full[self._begin : self._end].clone()
        streams.name_tensor(self.shard, f"shard of {name}")
        self.is_cast = row.travels_as != row.dtype
        self.pieces: list[nn.Parameter] = []
        self._held: list[tuple[ParameterInfo, nn.Parameter, int]] = []  # see `cut`
        self._cuts: list[int] = []
        at = 0
        for info, place in zip(row.parameters, partition.pieces(rank), strict=True):
            begin, end = place.in_shard
            part, trains = self.shard[begin:end], info.parameter.requires_grad
            self.pieces.append(nn.Parameter(part, requires_grad=trains))
            if len(place):
                self._cuts += [begin - at] * (begin > at)  # padding
                self._held.append((info, self.pieces[-1], len(self._cuts)))
                self._cuts.append(end - begin)
                at = end
        self._cuts.append(size - at)

    def cut(self, part: Tensor) -> list[tuple[ParameterInfo, nn.Parameter, Tensor]]:
        """(parameter, its piece, as much of `part`) of pieces that have an element."""
        parts = part.split_with_sizes(self._cuts)
        return [(info, piece, parts[at]) for info, piece, at in self._held]

    def views(self, full: Tensor) -> list[Tensor]:
        """Each parameter inside a full row, in its own shape and memory order."""
        return [
            full[entry.offset :].as_strided(entry.shape, info.stride)
            for info, entry in zip(
                self.row.parameters, self.row.partition.entries, strict=True
            )
        ]

    def place(self, buffer: Tensor) -> None:
        """Make its parameters views of `buffer`, `row.slot_bytes` long."""
        row = self.row
        full = buffer[: row.gathered_bytes].view(row.travels_as)
        for info, view in zip(row.parameters, self.views(full), strict=True):
            info.parameter.data = view
        mine = full[self._begin : self._end] if self.is_cast else self.shard
        self.full, self.sent = as_real(full), as_real(mine)
        self.leaving, self.leaving_views = None, []
        if row.partition.full_bytes <= len(buffer):
            self.leaving = buffer[: row.partition.full_bytes].view(row.dtype)
            self.leaving_views = self.views(self.leaving)

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
        self.is_rest, self.is_lookup = unit.is_rest, unit.is_lookup
        self.is_late = unit.is_late
        self.parameters: tuple[ParameterInfo, ...] = unit.parameters
        self.rows = [
            ShardedRow(row, rank, unit.name)
            for row in plan_rows(unit, world_size, mixed)
        ]
        self.slot_bytes = slot_bytes([row.row for row in self.rows])

    def place(self, slot: int, buffer: Tensor) -> None:
        """Make its parameters views of `buffer`, bytes of `slot`."""
        self.slot, at = slot, 0
        for row in self.rows:
            row.place(buffer[at : at + row.row.slot_bytes])
            at += row.row.slot_bytes


class Slot:
    """Bytes of the ring: whose they are, and who still uses them.

    Args:
        buffer: its memory.

    Attributes:
        unit: whose gather was the last one into it; None: gradients, or nothing.
        works: of that gather, or of the scatter that reads it.
        readers: streams that have waited for `works`, and may read what is there.
        leaves: `works` are of a scatter.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.unit: ShardedUnit | None = None
        self.works: list[Any] = []
        self.readers: dict[Hashable, None] = {}
        self.leaves = False


class Ring:
    """The slots of the units, and one for the rest.

    Args:
        units: all of them, the rest (if there is one) last.
        num_slots: of the ring.
        group: the ranks.
    """

    def __init__(
        self, units: Sequence[ShardedUnit], num_slots: int, group: dist.ProcessGroup
    ) -> None:
        self._units, self._group = units, group
        self._provider = streams.provider()
        self._stream_key = streams.key_reader(self._provider)
        # A gather that waits for a scatter waits here, or what computes would wait.
        self._side = streams.Stream()
        self.num_slots = num_slots
        self._slots: list[Slot] = []

    def place(self, slots: Sequence[int]) -> None:
        """Give each unit its slot; what the ring had is gone.

        Allocates, unless the slots that there are have the right sizes.

        Args:
            slots: of each unit but the rest, whose slot is behind the ring.
        """
        slots = [*slots, *[self.num_slots] * (len(self._units) - len(slots))]
        sizes = slot_sizes([unit.slot_bytes for unit in self._units], slots)
        if sizes != [len(slot.buffer) for slot in self._slots]:
            device = self._units[0].rows[0].shard.device
            self._slots = [
                Slot(torch.zeros(size, dtype=torch.uint8, device=device))
                for size in sizes
            ]
            for number, slot in enumerate(self._slots):
                streams.name_tensor(slot.buffer, f"ring slot {number}")
        for unit, number in zip(self._units, slots, strict=True):
            unit.place(number, self._slots[number].buffer)
        self.forget()

    def forget(self) -> None:
        """Shards have changed, or will: whatever is gathered is old."""
        for slot in self._slots:
            slot.unit = None

    def has(self, unit: ShardedUnit) -> bool:
        """Whether the unit's weights are in its slot, or on their way."""
        return self._slots[unit.slot].unit is unit

    def launch(self, unit: ShardedUnit) -> None:
        """Gather `unit` into its slot, behind all that used what is in it.

        The slot, and the shards, belong to the gather until `wait`.
        """
        slot = self._slots[unit.slot]
        if slot.leaves:
            with self._provider.stream(self._side):
                self._launch(slot, unit)
        else:
            self._launch(slot, unit)

    def _launch(self, slot: Slot, unit: ShardedUnit) -> None:
        self._free(slot)
        slot.unit, slot.leaves, slot.works = unit, False, []
        with self._provider.annotate(f"gather {unit.name}"):
            for row in unit.rows:
                if row.is_cast:
                    row.sent.copy_(row.shard)
                slot.works.append(launch_all_gather(self._group, row.full, row.sent))

    def take(self, unit: ShardedUnit) -> None:
        """Let the current stream write gradients into the unit's slot."""
        slot = self._slots[unit.slot]
        self._free(slot)
        slot.unit = None

    def lend(self, unit: ShardedUnit, works: Sequence[Any]) -> None:
        """The slot, which was taken, belongs to these works of a scatter."""
        slot = self._slots[unit.slot]
        slot.works, slot.leaves = list(works), True

    def settle(self) -> None:
        """The current stream has waited for all scatters."""
        for slot in self._slots:
            if slot.leaves:
                slot.leaves, slot.works = False, []
                slot.readers = {self._stream_key(): None}

    def _free(self, slot: Slot) -> None:
        """Let the current stream wait for all that reads or writes `slot`."""
        here = self._stream_key()
        if not slot.readers:  # nobody waited for the works
            for work in slot.works:
                work.wait()
        for reader in slot.readers:
            if reader != here:
                stream_of(here).wait_stream(stream_of(reader))
        slot.readers = {}

    def wait(self, unit: ShardedUnit) -> None:
        """Let the current stream wait for the unit's gather, once a stream."""
        self._wait(self._slots[unit.slot])

    def drain(self) -> None:
        """Let the current stream wait for all works: shards may be written then.

        Works are dropped: those of a step that was captured in a CUDA graph must not be
        waited for by a later one.
        """
        for slot in self._slots:
            self._wait(slot)
            slot.works = []

    def _wait(self, slot: Slot) -> None:
        here = self._stream_key()
        if here not in slot.readers:
            for work in slot.works:
                work.wait()
            slot.readers[here] = None
