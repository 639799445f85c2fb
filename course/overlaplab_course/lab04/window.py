"""Exercise 4.4: at most k messages' memory, and nobody waits for it.

A backward pass makes bfloat16 gradients; what travels is a float32 copy of each. The
copies are the extra memory that is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from overlaplab.cluster.run import Run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import Violation
from overlaplab.grading.violation import ms
from overlaplab.program import Program
from overlaplab.program.record import StorageLife
from overlaplab.streams import annotate
from overlaplab.timeline import Timeline
from overlaplab_course.lab04 import reference
from overlaplab_course.lab04.board import BOARD, Inputs, cpu_waits_ns, play

BACKWARD = "backward"
SHAPE = (250, 400)
MESSAGE_BYTES = 4 * SHAPE[0] * SHAPE[1]
# Tokens of each layer: bursts of cheap gradients before a dear one.
TOKENS = (150, 50, 50, 50, 1200, 150, 50, 50, 50, 1200)
WORLD = 2
# The CPU is out of the picture here: what is looked at is who waits for whom.
FAST_CPU = replace(
    BOARD, name="board, fast CPU", launch_ns=1_000, collective_launch_ns=2_000
)

VALUES = "each gradient is the mean over the ranks"
SAFE = "nothing touches a message while it travels, and each is waited for"
MEMORY = "never more than k messages are alive, for k of 1, 2 and 3"
FREE = "the backward pass does not wait for messages, at k = 2"
STEP = "the step is as short as k allows, within 3 %"

Layer = tuple[torch.Tensor, torch.Tensor]
Average = Callable[[Sequence[Layer], int], Sequence[torch.Tensor]]


def backward(layer: Layer) -> torch.Tensor:
    """The gradient of one layer, bfloat16, computed on the current stream."""
    with annotate(BACKWARD):
        return (layer[0] @ layer[1]).bfloat16()


def backward_us() -> list[int]:
    """What each layer's gradient takes to compute, in us."""
    flops = [2 * SHAPE[0] * SHAPE[1] * tokens for tokens in TOKENS]
    return [round(1e6 * n / FAST_CPU.flops_per_s["default"]) for n in flops]


@lru_cache(maxsize=2)
def window_inputs(world_size: int = WORLD) -> Inputs:
    """([layer, ...],) of each rank."""
    made = []
    for rank in range(world_size):
        draw = torch.Generator().manual_seed(40 + rank)
        layers = [
            (
                torch.randn(SHAPE[0], n, generator=draw) / n**0.5,
                torch.randn(n, SHAPE[1], generator=draw),
            )
            for n in TOKENS
        ]
        made.append((layers,))
    return made


def step(layers: Sequence[Layer], average: Average, k: int) -> list[torch.Tensor]:
    """What is graded: all gradients, averaged, read right after the call."""
    grads = average(layers, k)
    return [g.clone() if isinstance(g, torch.Tensor) else g for g in grads]


def play_window(average: Average, k: int) -> Run:
    """Ten layers on two ranks of the board, with at most `k` messages alive."""
    return play(step, window_inputs(), average, k, hardware=FAST_CPU)


def messages_alive(program: Program, rank: int = 0) -> float:
    """The most memory that messages held at any time, in messages.

    A message's memory is what its collective reads or writes, from its allocation to
    its release, in the order of the CPU. After `record_stream` a release gives nothing
    back until the device has come to it, and the CPU is far ahead by then: such memory
    counts to the end.
    """
    touched = {
        access.storage
        for op in program.ranks[rank]
        if op.collective is not None
        for access in (*op.reads, *op.writes)
    }
    lives = [s for s in program.storages if s.rank == rank and s.storage in touched]
    num_ops = len(program.ranks[rank])
    change = [0] * (num_ops + 2)
    for life in lives:
        change[life.born] += life.bytes
        held = life.freed is None or _recorded_elsewhere(life)
        change[num_ops + 1 if held else life.freed or 0] -= life.bytes
    most = now = 0
    for delta in change:
        now += delta
        most = max(most, now)
    return most / MESSAGE_BYTES


def _recorded_elsewhere(life: StorageLife) -> bool:
    return any(stream != life.stream for stream, _ in life.recorded)


def backward_end_ns(timeline: Timeline) -> int:
    """When the last gradient is there, on the slowest rank."""
    return max(
        (
            span.end_ns
            for span in timeline.spans
            if span.kind == "compute" and span.attributes.get("label") == BACKWARD
        ),
        default=0,
    )


@lru_cache(maxsize=1)
def _oracle() -> list[torch.Tensor]:
    ranks = [[backward(layer) for layer in layers] for (layers,) in window_inputs()]
    return [
        (torch.stack([g.float() for g in grads]).sum(0) / WORLD).bfloat16()
        for grads in zip(*ranks, strict=True)
    ]


@lru_cache(maxsize=4)
def _reference(k: int) -> tuple[int, int]:
    seen = play_window(reference.average_gradients, k)
    return seen.timeline.step_ns, backward_end_ns(seen.timeline)


@exercise(
    "4.4",
    title="a window of k messages",
    solution="average_gradients",
    verifies=(VALUES, SAFE, MEMORY, FREE, STEP),
    points=3,
    timeout_s=120.0,
)
def grade_window(sheet: Sheet, average_gradients: Average) -> None:
    """Values and hazards; memory from the record; who waits from the timeline."""
    for k in (2, 1, 3):
        sheet.ran(f"your function: {len(TOKENS)} layers, {WORLD} ranks, k = {k}")
        seen = play_window(average_gradients, k)
        assert seen.program is not None
        step_ns, end_ns = _reference(k)
        if k == 2:
            sheet.show(
                seen.timeline.of_rank(0),
                step_ns=seen.timeline.step_ns,
                target_ns=step_ns,
                title="your run, k = 2",
            )
        sheet.verify(SAFE, laws.no_findings_law(seen.warnings))
        sheet.verify(VALUES, _wrong_means(seen.values))
        sheet.verify(VALUES, laws.origin_law(seen.program, what="a gradient"))
        sheet.verify(MEMORY, _too_many(seen.program, k))
        sheet.stop_if_wrong()
        if k == 2:
            sheet.verify(FREE, _late(seen.timeline, end_ns))
            sheet.stop_if_wrong()
        wrong = laws.step_law(seen.timeline.step_ns, step_ns, factor=1.03)
        sheet.verify(STEP, [replace(v, message=f"k = {k}: {v.message}") for v in wrong])
        sheet.stop_if_wrong()


def _wrong_means(values: Sequence[Any]) -> list[Violation]:
    right = {f"layer {i}": g for i, g in enumerate(_oracle())}
    seen = [
        {f"layer {i}": g for i, g in enumerate(value) if isinstance(g, torch.Tensor)}
        for value in values
    ]
    return laws.values_law(seen, right)


def _too_many(program: Program, k: int) -> list[Violation]:
    most = max(messages_alive(program, rank) for rank in range(WORLD))
    if most <= k:
        return []
    hint = (
        "what still refers to a message after its mean was written back? The list, and "
        "the names of your loop too"
    )
    if any(_recorded_elsewhere(life) for life in program.storages):
        hint = (
            "record_stream makes a release safe by putting it off: the allocator makes "
            "new memory meanwhile. Allocate on the stream that uses it"
        )
    return [
        Violation(
            "memory",
            f"k = {k}: the float32 messages of {most:g} gradients were alive at once",
            f"at most {k}",
            hint,
        )
    ]


def _late(timeline: Timeline, end_ns: int) -> list[Violation]:
    seen_ns = backward_end_ns(timeline)
    if seen_ns <= 1.03 * end_ns:
        return []
    hint = "which stream is current where you call wait()?"
    if cpu_waits_ns(timeline) > seen_ns // 20:
        hint = "the CPU waits, and launches the next layer late"
    return [
        Violation(
            "blocked",
            f"the last gradient was there at {ms(seen_ns)}",
            f"by {ms(int(1.03 * end_ns))}: messages delay no gradient",
            hint,
        )
    ]
