"""Laws of this lab's own: who makes the CPU wait, what packs beside, what is held."""

from __future__ import annotations

from overlaplab.cluster.run import Run
from overlaplab.grading.violation import Violation, ms
from overlaplab_course.lab03.play import SET_UP


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


def packed_in_turn(run: Run) -> list[Violation]:
    """On every rank `pack N` runs beside `back N - 1`, the next layer's."""
    when: dict[tuple[int, str], tuple[int, int]] = {}
    for span in run.timeline.spans:
        label = str(span.attributes.get("label"))
        if span.kind == "compute":
            start, end = when.get((span.rank, label), (span.start_ns, span.end_ns))
            when[span.rank, label] = min(start, span.start_ns), max(end, span.end_ns)
    found = []
    for (rank, label), (start, end) in when.items():
        word, _, number = label.partition(" ")
        if word != "pack":
            continue
        following = f"back {int(number) - 1}"
        if (rank, following) not in when:
            continue
        next_start, next_end = when[rank, following]
        if max(start, next_start) >= min(end, next_end):
            found.append(
                Violation(
                    "overlap",
                    f"rank {rank}: '{label}' runs from {ms(start)} to {ms(end)}, "
                    f"'{following}' from {ms(next_start)} to {ms(next_end)}",
                    f"'{label}' beside '{following}'",
                    "the message must wait for the packing; the next backward pass "
                    "need not. Which stream is current where the message is launched?",
                    rank=rank,
                )
            )
    return found


def crowded(run: Run, at_most: int) -> list[Violation]:
    """On every rank Python refers to at most `at_most` batches at a time.

    After `record_stream` the allocator keeps a dropped batch until the device is
    there; how many that are is a matter of how far the CPU is ahead, and not judged.
    """
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
                    f"Python on rank {rank} holds {most} batches at a time",
                    f"at most {at_most}",
                    "when may a batch go? Who keeps it?",
                    rank=rank,
                )
            )
    return found
