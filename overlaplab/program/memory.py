"""Memory of one rank from the record: which bytes live when, the peak, who holds it.

Counts what the program allocated on the device, as its CPU did it; fragmentation, and
memory that a stream still uses after its release, are not in it. Over time, on a
machine, allocations are multiples of the allocator's and cuBLAS has its workspaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from overlaplab.hardware import Hardware, kernel_kind
from overlaplab.program.kinds import memory_kinds
from overlaplab.program.record import Program, StorageLife
from overlaplab.timeline.span import MEMORY_KINDS, Memory

_NUM_HOLDERS = 5


@dataclass(frozen=True, slots=True)
class Holder:
    """One allocation that lives at the peak, and what people call it.

    Args:
        storage: as in `StorageLife`.
        bytes: its size.
        name: of the tensor, where known: "layers.0.weight"; "" otherwise.
        made_by: name of the first operator that wrote it ("mm"), "" if none did: it
            was there before the program, or is empty.
        source: the line of the user's code that launched that operator, of the backward
            pass that of its forward; "" if none.
    """

    storage: int
    bytes: int
    name: str = ""
    made_by: str = ""
    source: str = ""

    def __str__(self) -> str:
        """The name, or the operator that made it and where: for pictures."""
        if self.name:
            return self.name
        if not self.made_by:
            return f"storage {self.storage}"
        return self.made_by + (f" [{self.source}]" if self.source else "")


def live_bytes(program: Program, rank: int = 0) -> list[tuple[int, int]]:
    """The bytes that `rank` holds on its device, as steps.

    Returns:
        [(op_index, bytes), ...], ascending: from just before operator `op_index` until
        the next entry, `bytes` are allocated. Starts with operator 0. Where something
        is freed and something allocated before the same operator, the free came first.

    Raises:
        ValueError: the rank was not recorded.
    """
    return _steps(_lives(program, rank))


def live_by_kind(program: Program, rank: int = 0) -> dict[str, list[tuple[int, int]]]:
    """The steps of `live_bytes`, those of each kind that occurs; see `MEMORY_KINDS`.

    Every list has an entry wherever an allocation of any kind begins or ends, and the
    same ones as the others.
    """
    kinds, changes = _steps_of_kinds(program, rank)
    return {
        kind: [(index, sizes[place]) for index, sizes in changes]
        for place, kind in enumerate(kinds)
    }


def _steps_of_kinds(
    program: Program, rank: int
) -> tuple[list[str], list[tuple[int, tuple[int, ...]]]]:
    """The kinds that occur, and the bytes of each wherever an allocation begins or
    ends, and at operator 0."""
    of_storage, lives = memory_kinds(program, rank), _lives(program, rank)
    occurring = {of_storage[life.storage] for life in lives}
    kinds = [kind for kind in MEMORY_KINDS if kind in occurring]
    places = {kind: place for place, kind in enumerate(kinds)}
    changes: dict[int, list[tuple[int, int]]] = {0: []}
    for life in lives:
        place = places[of_storage[life.storage]]
        changes.setdefault(life.born, []).append((place, life.bytes))
        if life.freed is not None:
            changes.setdefault(life.freed, []).append((place, -life.bytes))
    sizes = [0] * len(kinds)
    steps = []
    for index in sorted(changes):
        for place, bytes in changes[index]:
            sizes[place] += bytes
        steps.append((index, tuple(sizes)))
    return kinds, steps


def _steps(lives: Iterable[StorageLife]) -> list[tuple[int, int]]:
    """The bytes of `lives`, with an entry at operator 0."""
    change = {0: 0}
    for life in lives:
        change[life.born] = change.get(life.born, 0) + life.bytes
        if life.freed is not None:
            change[life.freed] = change.get(life.freed, 0) - life.bytes
    order = sorted(change)
    return list(zip(order, accumulate(change[at] for at in order), strict=True))


def peak_bytes(program: Program, rank: int = 0) -> int:
    """The most bytes that `rank` held at any operator."""
    return max(bytes for _, bytes in live_bytes(program, rank))


def end_bytes(program: Program, rank: int = 0) -> int:
    """The bytes that `rank` still holds at the end: parameters, states, leaks."""
    return live_bytes(program, rank)[-1][1]


def held_at_peak(program: Program, rank: int = 0) -> tuple[StorageLife, ...]:
    """The storages that live at the (first) peak, largest first."""
    steps = live_bytes(program, rank)
    peak = max(bytes for _, bytes in steps)
    at = next(index for index, bytes in steps if bytes == peak)
    living = [
        life
        for life in _lives(program, rank)
        if life.born <= at and (life.freed is None or life.freed > at)
    ]
    return tuple(sorted(living, key=lambda life: (-life.bytes, life.storage)))


def top_holders(program: Program, rank: int = 0, num: int = 5) -> tuple[Holder, ...]:
    """The `num` largest allocations at the (first) peak of `rank`, largest first.

    Raises:
        ValueError: the rank was not recorded, or `num` is less than 1.
    """
    if num < 1:
        raise ValueError(f"num is {num}; expected at least 1 holder")
    lives = held_at_peak(program, rank)[:num]
    makers: dict[int, tuple[str, str]] = {}
    wanted = {life.storage for life in lives}
    for op in program.ranks[rank]:
        line = op.attributes.get("forward") or op.source
        for access in op.writes:
            if access.storage in wanted:
                makers.setdefault(access.storage, (op.name, line))
    return tuple(
        Holder(
            life.storage,
            life.bytes,
            life.name,
            *makers.get(life.storage, ("", "")),
        )
        for life in lives
    )


def _lives(program: Program, rank: int) -> list[StorageLife]:
    if not 0 <= rank < len(program.ranks):
        raise ValueError(
            f"rank {rank} was not recorded; the program has ranks 0 to "
            f"{len(program.ranks) - 1}"
        )
    return [life for life in program.storages if life.rank == rank and not life.host]


def as_allocated(program: Program, hw: Hardware) -> Program:
    """`program` with its device's allocations as `hw` has them, workspaces included."""
    if hw.allocation_bytes == 1 and not hw.workspace_bytes:
        return program
    block = hw.allocation_bytes
    lives = [
        life if life.host else replace(life, bytes=-(-life.bytes // block) * block)
        for life in program.storages
    ]
    for rank, ops in enumerate(program.ranks if hw.workspace_bytes else ()):
        number = max((life.storage for life in lives if life.rank == rank), default=-1)
        seen: set[str] = set()
        for op in ops:
            is_matmul = op.flops and kernel_kind(op.name, op.flops) == "matmul"
            if is_matmul and "convolution" not in op.name and op.stream not in seen:
                seen.add(op.stream)
                life = StorageLife(
                    rank=rank,
                    storage=number + len(seen),
                    bytes=hw.workspace_bytes,
                    born=op.index,
                    freed=None,
                    stream=op.stream,
                    name="cuBLAS workspace",
                    kind="workspaces",
                )
                lives.append(life)
    return replace(program, storages=tuple(lives))


def memory_over_time(
    program: Program, starts_ns: Sequence[Sequence[int]], end_ns: int, hw: Hardware
) -> tuple[Memory, ...]:
    """The memory of each recorded rank that allocated anything; see `Memory`. By rank,
    `starts_ns` says when each operator started: less than 0 for one that never did."""
    program = as_allocated(program, hw)
    found = []
    for rank in sorted({life.rank for life in program.storages if not life.host}):
        came_ns = _came(program, rank, starts_ns[rank])
        occurring, changes = _steps_of_kinds(program, rank)
        steps: list[tuple[int, int]] = []
        parts: list[tuple[int, ...]] = []
        for index, part in changes:
            size = sum(part)
            time_ns = came_ns[index] if index < len(came_ns) else end_ns
            if steps and steps[-1][0] == time_ns:
                # Operators that take no time: the most that was held then.
                before, its_part = steps.pop(), parts.pop()
                if before[1] > size:
                    size, part = before[1], its_part
            if not parts or parts[-1] != part:
                steps.append((time_ns, size))
                parts.append(part)
        holders = tuple(
            (str(holder), holder.bytes)
            for holder in top_holders(program, rank, _NUM_HOLDERS)
        )
        kinds = tuple(zip(occurring, zip(*parts, strict=True), strict=True))
        found.append(Memory(rank, tuple(steps), holders, kinds))
    return tuple(found)


def _came(program: Program, rank: int, starts_ns: Sequence[int]) -> list[int]:
    """When the device came to each operator. A collective starts early or late beside
    the others and says nothing."""
    came, latest = [], 0
    for op, start_ns in zip(program.ranks[rank], starts_ns, strict=True):
        if op.kind != "communication":
            latest = max(latest, start_ns)
        came.append(latest)
    return came
