"""Plays a job on the virtual cluster, in slow motion, and keeps what it proves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run, run
from overlaplab.grading.violation import Violation
from overlaplab.hardware import Link, find_hardware
from overlaplab.program import Finding
from overlaplab.timeline import Span, Timeline
from overlaplab_course.lab03.jobs import COMPUTE, INPUT, LOAD, WIRE, Job, Piece

NUM_RANKS = 2
SET_UP = "set up"
WIDTH = 64  # buffers are 64 x 64 and more rows where the wire needs more bytes
_UNIT_BYTES = 4 * WIDTH * WIDTH  # 1 ms of a wire or of a copy
_UNIT_FLOPS = 2 * WIDTH**3  # 1 ms of computing

# One unit of work takes 1 ms, so that times can be added in the head.
SLOW = replace(
    find_hardware("chalk"),
    name="slow motion",
    flops_per_s={"default": 1000 * _UNIT_FLOPS},
    memory_bytes_per_s=10**15,
    link=Link(latency_ns=0, bytes_per_s=1000 * _UNIT_BYTES, source="round numbers"),
    host_bytes_per_s=1000 * _UNIT_BYTES,
    pageable_bytes_per_s=500 * _UNIT_BYTES,
    source=(
        "round numbers: a unit of computing, sending or copying takes 1 ms; a copy "
        "from memory that is not pinned takes twice as long"
    ),
)


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work, ready to be launched.

    Args:
        name: "back 3".
        on: the stream that it belongs on: "compute", "wire" (or "load").
        needs: names of tasks that must have ended before it starts; all of them stand
            earlier in the list.
        run: launches its operators on the current stream.
    """

    name: str
    on: str
    needs: tuple[str, ...]
    run: Callable[[], None]


Issue = Callable[[Sequence[Task]], object]


@dataclass(frozen=True, slots=True)
class Played:
    """A job, played.

    Args:
        job: which.
        run: what the virtual cluster recorded.
        values: by rank and buffer, what is in it at the end.
    """

    job: Job
    run: Run
    values: tuple[Mapping[str, torch.Tensor], ...]

    @property
    def timeline(self) -> Timeline:
        """Rank 0's timeline (all do the same), with the tasks' names on the spans."""
        return by_label(self.run.timeline).of_rank(0)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Races and the like."""
        return self.run.warnings

    @property
    def step_ns(self) -> int:
        return self.run.timeline.step_ns


def play(job: Job, issue: Issue) -> Played:
    """Run `issue(tasks)` for `job` on two ranks.

    The caller's stream writes the input before, and reads every buffer after.
    """
    recorded = run(_on_rank, job, issue, world_size=NUM_RANKS, hardware=SLOW)
    return Played(job, recorded, recorded.values)


def _on_rank(job: Job, issue: Issue) -> dict[str, torch.Tensor]:
    with streams.annotate(SET_UP):
        buffers = _buffers(job)
        streams.synchronize()  # what follows need not wait for it
    seed = torch.Generator().manual_seed(dist.get_rank())
    start = torch.randn(WIDTH, WIDTH, generator=seed)
    with streams.annotate("input"):
        compute([start], buffers[INPUT], 1)
    issue([make_task(job, piece, buffers) for piece in job.pieces])
    values = {name: buffer[:WIDTH] for name, buffer in buffers.items()}
    with streams.annotate("collect"):
        compute(list(values.values()), torch.empty(WIDTH, WIDTH), 1)
    return {name: value.clone() for name, value in values.items()}


def _buffers(job: Job) -> dict[str, torch.Tensor]:
    rows = {INPUT: WIDTH}
    for piece in job.pieces:
        units = 1 if piece.on == COMPUTE else piece.ms
        rows[piece.writes] = max(rows.get(piece.writes, 0), WIDTH * units)
    device = streams.device()
    made = {
        name: torch.zeros(number, WIDTH, device=device) for name, number in rows.items()
    }
    for name, buffer in made.items():
        streams.name_tensor(buffer, name)
    return made


def make_task(job: Job, piece: Piece, buffers: Mapping[str, torch.Tensor]) -> Task:
    """The task of `piece` on this rank's buffers."""
    inputs = [buffers[name][:WIDTH] for name in piece.reads]
    output = buffers[piece.writes]
    if piece.on == LOAD:
        number = 1 + job.pieces.index(piece)
        host = torch.full((WIDTH * piece.ms, WIDTH), 0.1 * number, device="cpu")
        host = host.pin_memory()

    def launch() -> None:
        with streams.annotate(piece.name):
            if piece.on == COMPUTE:
                compute(inputs, output, piece.ms)
            elif piece.on == WIRE:
                output[:WIDTH].copy_(_sum(inputs))
                dist.all_reduce(output[: WIDTH * piece.ms])
            else:
                output[: WIDTH * piece.ms].copy_(host, non_blocking=True)

    return Task(piece.name, piece.on, job.needs(piece.name), launch)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for other in tensors[1:]:
        total = total + other
    return total


def compute(inputs: Sequence[torch.Tensor], output: torch.Tensor, units: int) -> None:
    """One kernel of `units` milliseconds that reads all of `inputs`."""
    factor = torch.full((1, 1), 0.01, device=output.device)
    a, b = factor.expand(WIDTH, WIDTH * units), factor.expand(WIDTH * units, WIDTH)
    torch.addmm(_sum(inputs), a, b, out=output)


def by_label(timeline: Timeline) -> Timeline:
    """The same with labels in the place of operators' names: figures print them.

    What the CPU does keeps its name; what it did before the job is left out.
    """
    timeline = timeline.where(lambda span: span.attributes.get("label") != SET_UP)
    numbers = _message_numbers(timeline)

    def shown(span: Span) -> str:
        if span.attributes.get("label"):
            return str(span.attributes["label"])
        if span.kind == "communication":
            return f"{span.name} #{numbers[span.rank, int(span.attributes['op'])]}"
        return span.name

    return replace(
        timeline,
        spans=tuple(
            replace(span, name=shown(span))
            if span.kind not in ("launch", "host")
            else span
            for span in timeline.spans
        ),
    )


def _message_numbers(timeline: Timeline) -> dict[tuple[int, int], int]:
    """By (rank, op): the how-manieth message that is, as findings count."""
    ops = sorted(
        {
            (span.rank, int(span.attributes["op"]))
            for span in timeline.spans
            if span.kind == "communication"
        }
    )
    first = {rank: place for place, (rank, _) in reversed(list(enumerate(ops)))}
    return {key: place - first[key[0]] for place, key in enumerate(ops)}


def wrong_values(seen: Played, right: Played) -> list[Violation]:
    """Every buffer on every rank holds what the job computes in launch order."""
    found = []
    for rank, (mine, ours) in enumerate(zip(seen.values, right.values, strict=True)):
        for name, tensor in ours.items():
            if not torch.allclose(mine[name], tensor, rtol=1e-5, atol=1e-6):
                writers = [p.name for p in seen.job.pieces if p.writes == name]
                found.append(
                    Violation(
                        "values",
                        f"job '{seen.job.name}', rank {rank}: the result of "
                        f"{' and '.join(writers) or name} is wrong",
                        "each task is run once, after the tasks that it needs",
                        "is run() of every task called, once?",
                        rank=rank,
                    )
                )
    return found
