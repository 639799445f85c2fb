"""A program's memory in the time of a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from overlaplab.program.memory import live_bytes, top_holders
from overlaplab.program.record import Program
from overlaplab.timeline.memory import Memory

_NUM_HOLDERS = 5


def memory_over_time(
    program: Program, starts_ns: Sequence[Sequence[int]], end_ns: int
) -> tuple[Memory, ...]:
    """The memory of each recorded rank that allocated anything; see `Memory`.

    Args:
        program: the record.
        starts_ns: by rank, when each operator started; less than 0 for one that never
            did.
        end_ns: the end of the timeline.
    """
    found = []
    for rank in sorted({life.rank for life in program.storages if not life.host}):
        came_ns = _came(program, rank, starts_ns[rank])
        steps: list[tuple[int, int]] = []
        for index, size in live_bytes(program, rank):
            time_ns = came_ns[index] if index < len(came_ns) else end_ns
            if steps and steps[-1][0] == time_ns:
                # Operators that take no time: the most that was held then.
                size = max(size, steps.pop()[1])
            if not steps or steps[-1][1] != size:
                steps.append((time_ns, size))
        holders = tuple(
            (str(holder), holder.bytes)
            for holder in top_holders(program, rank, _NUM_HOLDERS)
        )
        found.append(Memory(rank, tuple(steps), holders))
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
