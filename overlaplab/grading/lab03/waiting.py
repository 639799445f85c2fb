"""Laws of this lab's own: who makes the CPU wait, and how much is alive at a time."""

from __future__ import annotations

from overlaplab.cluster.run import Run
from overlaplab.grading.lab03.play import SET_UP
from overlaplab.grading.violation import Violation


def cpu_waits(run: Run) -> list[Violation]:
    """Nothing blocks the CPU: no synchronize, no item()."""
    assert run.program is not None
    return [
        Violation(
            "cpu",
            f"on rank {op.rank} the CPU waits in {op.name}"
            + (f" [{op.source}]" if op.source else ""),
            "streams wait for events; the CPU goes on",
            "wait_event makes a stream wait, synchronize makes the CPU wait",
            rank=op.rank,
        )
        for ops in run.program.ranks
        for op in ops
        if op.kind == "host_wait" and op.label != SET_UP
    ]


def crowded(run: Run, at_most: int) -> list[Violation]:
    """On every rank at most `at_most` batches are referred to at a time."""
    assert run.program is not None
    found = []
    for rank, ops in enumerate(run.program.ranks):
        lives = [
            (life.born, len(ops) if life.freed is None else life.freed)
            for life in run.program.storages
            if life.rank == rank and life.name.startswith("batch ")
        ]
        most = max(
            (sum(b <= born < freed for b, freed in lives) for born, _ in lives),
            default=0,
        )
        if most > at_most:
            found.append(
                Violation(
                    "memory",
                    f"rank {rank} holds {most} batches at a time",
                    f"at most {at_most}",
                    "when may a batch go? Who keeps it?",
                    rank=rank,
                )
            )
    return found
