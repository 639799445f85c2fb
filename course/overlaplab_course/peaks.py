"""The most memory of a recorded step, for who compares it with a reference."""

from __future__ import annotations

from overlaplab.program import Program
from overlaplab.program.record import StorageLife


def most_bytes(program: Program, *, in_forward: bool = False) -> int:
    """The most that any rank held, in the order of its code, as an allocator counts.

    What is made before the old is released lives beside it, though no operator runs in
    between.

    Args:
        in_forward: until the last operator whose label begins with "forward".
    """
    return max(_most(program, rank, in_forward) for rank in range(len(program.ranks)))


def _most(program: Program, rank: int, in_forward: bool) -> int:
    lives = [s for s in program.storages if s.rank == rank and not s.host]
    if in_forward:
        labels = ((op.index, op.label) for op in program.ranks[rank])
        last = max(index for index, label in labels if label.startswith("forward"))
        lives = [s for s in lives if s.born <= last]
    lives.sort(key=lambda life: (life.born, life.storage))
    held, most, living = 0, 0, list[StorageLife]()
    for new in lives:
        gone = [old for old in living if _is_gone(old, new)]
        living = [old for old in living if old not in gone]
        held += new.bytes - sum(old.bytes for old in gone)
        living.append(new)
        most = max(most, held)
    return most


def _is_gone(old: StorageLife, new: StorageLife) -> bool:
    """Whether `old` was released before `new` was allocated."""
    if old.freed is None or old.freed != new.born:
        return old.freed is not None and old.freed < new.born
    return old.freed_before is None or old.freed_before <= new.storage
