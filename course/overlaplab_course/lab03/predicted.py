"""Section 1's job as it was measured on GPUs, timed for a hardware profile instead."""

from __future__ import annotations

from overlaplab.hardware import Hardware
from overlaplab.program import ProgramBuilder, resolve
from overlaplab_course.lab03.jobs import COMPUTE, backward_job

# As `overlaplab_course.lab03.measure` measures it: what a unit of work is.
MATMUL = 4096
MESSAGE_BYTES = 64 * 2**20


def predicted_ms(
    hardware: str | Hardware, *, events: bool, num_ranks: int = 2
) -> float:
    """The step in ms: on one stream, or on two with an event a task."""
    job = backward_job()
    builder = ProgramBuilder(num_ranks=1, represents=num_ranks)
    ended: dict[str, tuple[int, ...]] = {}
    for piece in job.pieces:
        stream = "wire" if events and piece.on != COMPUTE else "default"
        for need in job.needs(piece.name):
            builder.wait_event(0, stream, ended[need])
        if piece.on == COMPUTE:
            for _ in range(piece.ms):
                builder.compute(0, "mm", flops=2 * MATMUL**3, dtype="bfloat16")
        else:
            builder.collective(
                0,
                "all_reduce",
                bytes=MESSAGE_BYTES * piece.ms,
                stream=stream,
                async_op=False,
            )
        ended[piece.name] = builder.record_event(0, stream)
    return resolve(builder.build(), hardware).step_ns / 1e6
