"""Memory of one rank from the record: which bytes live when, and the peak.

Counts what the program allocated, as its CPU did it: a caching allocator's blocks and
fragmentation, and memory that a stream still uses after its release, are not in it.
"""

from __future__ import annotations

from overlaplab.program.record import Program, StorageLife


def live_bytes(program: Program, rank: int = 0) -> list[tuple[int, int]]:
    """The bytes that `rank` holds, as steps.

    Returns:
        [(op_index, bytes), ...], ascending: from just before operator `op_index` until
        the next entry, `bytes` are allocated. Starts with operator 0. Where something
        is freed and something allocated before the same operator, the free came first.

    Raises:
        ValueError: the rank was not recorded.
    """
    change: dict[int, int] = {0: 0}
    for life in _lives(program, rank):
        change[life.born] = change.get(life.born, 0) + life.bytes
        if life.freed is not None:
            change[life.freed] = change.get(life.freed, 0) - life.bytes
    live = 0
    steps = []
    for index in sorted(change):
        live += change[index]
        steps.append((index, live))
    return steps


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


def _lives(program: Program, rank: int) -> list[StorageLife]:
    if not 0 <= rank < len(program.ranks):
        raise ValueError(
            f"rank {rank} was not recorded; the program has ranks 0 to "
            f"{len(program.ranks) - 1}"
        )
    return [life for life in program.storages if life.rank == rank]
