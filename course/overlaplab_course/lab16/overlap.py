"""Computing again beside messages: which choice makes the shortest step. For 16.7."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab16.chains import Block

# One operation is one millisecond, one byte of a message over two ranks another.
CLOCK: Hardware = replace(
    find_hardware("chalk"),
    name="chalk, 1 ms a unit",
    flops_per_s={"default": 1000},
    memory_bytes_per_s=10**15,
    kernel_floor_ns=0,
    launch_ns=0,
    collective_launch_ns=0,
    link=Link(latency_ns=0, bytes_per_s=1000, source="round numbers"),
)
# Block 4 has most of the parameters (experts, say) and is the cheapest to compute.
EXAMPLE = (
    Block(2, 30, 2, 7),
    Block(2, 30, 2, 6),
    Block(2, 30, 2, 6),
    Block(2, 30, 2, 5),
    Block(2, 30, 2, 4),
    Block(2, 30, 2, 4),
)
MESSAGES = (3, 3, 3, 3, 66, 4)


def step(
    blocks: Sequence[Block], messages_ms: Sequence[int], again: Collection[int]
) -> Timeline:
    """Forwards, then backwards, each of which sends its gradients when it is over."""
    b = ProgramBuilder(num_ranks=1, represents=2)
    for number, block in enumerate(blocks):
        b.compute(0, f"F{number}", flops=block.ms)
    works = []
    for number, block in reversed([*enumerate(blocks)]):
        if number in again:
            b.compute(0, f"F{number} again", flops=block.ms)
        b.compute(0, f"B{number}", flops=2 * block.ms)
        works.append(b.collective(0, "all_reduce", bytes=messages_ms[number]))
    for work in works:
        b.wait(0, work)
    return resolve(b.build(), CLOCK)
