"""What 8.6 runs: weights that are replaced while a model answers with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import origins
from overlaplab.grading.forms import Examined
from overlaplab.program.access import num_bytes
from overlaplab.timeline import Timeline
from overlaplab_course.lab03.jobs import SET_UP, SLOW, SLOW_COPIES, WIDTH, by_label

NUM_VERSIONS = 4
ANSWER = "answer"
ROWS, _COLUMNS = 5 * WIDTH, 144
# Five ms to bring a version from the host, two to copy it on the device.
BOARD = replace(SLOW, name="slow memory", memory_bytes_per_s=4000 * ROWS * WIDTH)
SLOWER = replace(
    SLOW_COPIES,
    name="slow memory, copies and launches",
    memory_bytes_per_s=2000 * ROWS * WIDTH,
)

Answer = Callable[[torch.Tensor], None]
# (front, back, versions, answer)
Serve = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Answer], object]


class Served(Examined):
    """A run; `values`: by rank, what each answer was made from."""

    @property
    def timeline(self) -> Timeline:
        """Rank 0's."""
        return by_label(self.run.timeline).of_rank(0)

    @property
    def step_ns(self) -> int:
        """From the first launch after the set-up on, as the figure has it."""
        return by_label(self.run.timeline).step_ns

    def copied_bytes(self, rank: int) -> int:
        """Bytes that the learner's code writes on the device, but for copies to it."""
        return sum(
            num_bytes(access)
            for op in self.program.ranks[rank]
            if op.kind == "compute" and op.label not in (SET_UP, ANSWER)
            for access in op.writes
        )


def serve(
    program: Serve,
    num_versions: int = NUM_VERSIONS,
    num_ranks: int = 2,
    rows: int = ROWS,
) -> Served:
    """Run `program` on this many new versions; it answers with each.

    Args:
        rows: of the weights, `WIDTH` float32 each.
    """
    options: dict[str, Any] = {"world_size": num_ranks, "hardware": BOARD}
    return Served.of(_on_rank, program, num_versions, rows, timeout_s=30, **options)


def _on_rank(program: Serve, num_versions: int, rows: int) -> origins.Held:
    with streams.annotate(SET_UP):
        draw = torch.Generator().manual_seed(70 + dist.get_rank())
        versions = [
            torch.randn(rows, WIDTH, generator=draw, device="cpu").pin_memory()
            for _ in range(num_versions)
        ]
        front = torch.zeros(rows, WIDTH, device=streams.device())
        sets = [front, torch.zeros_like(front)]
        for letter, weights in zip("AB", sets, strict=True):
            streams.name_tensor(weights, f"set {letter}")
        streams.synchronize()
    answers: list[torch.Tensor] = []

    def answer(weights: torch.Tensor) -> None:
        factor = torch.full((1, 1), 0.01, device=weights.device)
        with streams.annotate(ANSWER):
            a, b = factor.expand(rows, _COLUMNS), factor.expand(_COLUMNS, WIDTH)
            made = torch.addmm(weights, a, b)
            answers.append(made.mean() + weights.mean())

    return origins.hold(program, *sets, versions, answer, results=lambda _: answers)
