"""How tensors are cut over ranks: one row of elements, equal shards, padding counted.

Pure data of shapes and sizes: knows no tensor, no group and no technique. Tensors lie
one behind the other in a *flat* row, whose n-th part is rank n's shard. A tensor may
begin on one rank and end on another, and a rank may have nothing but padding, so full
shapes come from here and never from shard * world_size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Elements: kernels read 16 bytes at once where a tensor begins at a multiple of it,
# also where two bytes of each element travel.
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a flat row.

    Args:
        name: of the tensor.
        shape: its full shape.
        offset: its first element in the row.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one tensor that lies on one rank; all ranges count elements.

    Args:
        entry: the tensor.
        in_shard: (begin, end) in the rank's shard.
        in_tensor: (begin, end) in the tensor's own elements, as they lie in memory.
    """

    entry: Entry
    in_shard: tuple[int, int]
    in_tensor: tuple[int, int]

    def __len__(self) -> int:
        return self.in_shard[1] - self.in_shard[0]


@dataclass(frozen=True, slots=True)
class Partition:
    """Tensors of one dtype in a row, cut into `world_size` equal shards.

    Args:
        entries: in order, none over another.
        world_size: number of shards.
        shard_numel: elements of each.
        itemsize: bytes of an element.
    """

    entries: tuple[Entry, ...]
    world_size: int
    shard_numel: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Elements of the row, padding included."""
        return self.shard_numel * self.world_size

    @property
    def num_padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.numel - sum(entry.numel for entry in self.entries)

    @property
    def shard_bytes(self) -> int:
        """Of one rank's shard."""
        return self.shard_numel * self.itemsize

    @property
    def full_bytes(self) -> int:
        """Of the row."""
        return self.numel * self.itemsize

    def pieces(self, rank: int) -> Iterator[Piece]:
        """For every entry, what of it is `rank`'s: maybe no element."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; expected 0 to {self.world_size - 1}")
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        for entry in self.entries:
            first = min(max(entry.offset, begin), end)
            last = max(min(entry.offset + entry.numel, end), first)
            at = min(max(first - entry.offset, 0), entry.numel)
            yield Piece(entry, (first - begin, last - begin), (at, at + last - first))

    def __str__(self) -> str:
        rows = [
            f"{len(self.entries)} tensors over {self.world_size} ranks: shards of "
            f"{self.shard_numel} elements, {self.num_padding} of {self.numel} padding"
        ]
        for rank in range(self.world_size):
            parts = [
                f"{p.entry.name}[{p.in_tensor[0]}:{p.in_tensor[1]}]"
                for p in self.pieces(rank)
                if len(p)
            ]
            rows.append(f"rank {rank:<3} {' '.join(parts) or '(padding)'}")
        return "\n".join(rows)


def plan_partition(
    tensors: Iterable[tuple[str, Sequence[int]]], world_size: int, itemsize: int = 4
) -> Partition:
    """Lay tensors of one dtype in a row and cut it into equal shards.

    Each tensor, and each shard, begins at a multiple of 8 elements; what that and the
    last shard leave over is padding, less than 8 elements a tensor and a shard.

    Args:
        tensors: (name, shape) in the order of the row; any shape, also of no element.
        world_size: number of shards.
        itemsize: bytes of an element.

    Returns:
        The partition; pure data, equal for equal input.

    Raises:
        ValueError: a world or an item without size, a negative shape, a name twice.

    >>> print(plan_partition([("weight", (5, 3)), ("bias", (5,))], world_size=2))
    2 tensors over 2 ranks: shards of 16 elements, 12 of 32 padding
    rank 0   weight[0:15]
    rank 1   bias[0:5]
    """
    for what, value in (("world_size", world_size), ("itemsize", itemsize)):
        if value < 1:
            raise ValueError(f"{what} is {value}; expected 1 or more")
    entries: list[Entry] = []
    names: set[str] = set()
    end = 0
    for name, shape in tensors:
        if name in names:
            raise ValueError(f"{name} is there twice; a shared tensor is one tensor")
        if any(size < 0 for size in shape):
            raise ValueError(f"{name} has shape {tuple(shape)}; expected sizes >= 0")
        names.add(name)
        entry = Entry(name, tuple(shape), _round_up(end, ALIGNMENT))
        entries.append(entry)
        end = entry.offset + entry.numel
    shard_numel = _round_up(-(-end // world_size), ALIGNMENT)
    return Partition(tuple(entries), world_size, shard_numel, itemsize)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
