"""What the lesson's programs work on: broken programs' objects, loops, chains, knobs.

A learner's number draws sizes, hence the tensor, the rank and the batch that are
concerned. `jobs` has the jobs of sections 1 to 3.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import origins
from overlaplab.grading.forms import KnobProgram, Settings
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab.timeline.intervals import merge, subtract, total
from overlaplab.view import Knob
from overlaplab_course.lab03 import broken
from overlaplab_course.lab03.jobs import (
    COMPUTE,
    INPUT,
    LOAD,
    NUM_RANKS,
    SET_UP,
    SLOW,
    WIDTH,
    WIRE,
    IssueOn,
    Job,
    Labelled,
    Piece,
    Played,
    by_label,
    compute,
    named_zeros,
    pinned,
    play,
)

Program = Callable[..., object]
Made = tuple[tuple[Any, ...], Callable[[], dict[str, torch.Tensor]]]

# -- 3.3: three broken programs


class Layer:
    """A layer of 3.3a.

    `grads` holds one or two gradients, `flat` what is sent. With one gradient, `flat`
    is that gradient. A second one lies in pinned memory of the host, where the weights
    are that it belongs to. All else is on the device.
    """

    def __init__(
        self, number: int, num_grads: int, start: torch.Tensor, units: int
    ) -> None:
        self.number, self._start = number, start
        self.grads = [named_zeros(f"grad {number}", WIDTH * units)]
        self.flat = self.grads[0]
        if num_grads > 1:
            self.grads.append(pinned(units, 0.1 * number + dist.get_rank()))
            self.flat = torch.zeros(2 * WIDTH * units, WIDTH, device=streams.device())
        streams.name_tensor(self.flat, f"flat {number}")

    def backward(self) -> None:
        """Compute the gradient of the device: 4 ms on the current stream."""
        with streams.annotate(f"back {self.number}"):
            grad = self.grads[0]
            compute([self._start], grad[:WIDTH], 4)
            grad.copy_(grad[:WIDTH].repeat(len(grad) // WIDTH, 1))

    def pack(self) -> None:
        """Copy the gradients into `flat`, on the current stream: 2 ms from the host."""
        with streams.annotate(f"pack {self.number}"):
            rows = len(self.grads[0])
            self.flat[:rows].copy_(self.grads[0])
            self.flat[rows:].copy_(self.grads[1], non_blocking=True)


class Tower:
    """A tower of 3.3b: rows of a table in the host's memory, and a layer."""

    def __init__(self, letter: str, fetch_ms: int, forward_ms: int) -> None:
        self.letter, self._units = letter, forward_ms
        self._host = pinned(fetch_ms, 0.1 + 0.1 * ord(letter) % 7)
        self.rows = named_zeros(f"rows {letter}", WIDTH * fetch_ms)
        self.out = named_zeros(f"out {letter}")

    def fetch(self) -> None:
        """Copy its rows to the device, on the current stream."""
        with streams.annotate(f"fetch {self.letter}"):
            self.rows.copy_(self._host, non_blocking=True)

    def forward(self) -> None:
        """Compute `out` from the rows, on the current stream."""
        with streams.annotate(f"tower {self.letter}"):
            compute([self.rows[:WIDTH]], self.out, self._units)


def num_grads(number: int) -> list[int]:
    """Of each layer, in the order of the backward pass; the first has one."""
    draw = random.Random(11 * int(number) + 3)
    rest = [1, 2, 2, draw.choice((1, 2))]
    draw.shuffle(rest)
    return [1, *rest]


def _layers(case: Case) -> Made:
    counts = num_grads(case.number)
    seed = torch.Generator().manual_seed(dist.get_rank())
    start = torch.randn(WIDTH, WIDTH, generator=seed)
    units = 2 + case.more_ms
    layers = [Layer(len(counts) - i, n, start, units) for i, n in enumerate(counts)]
    return (layers,), lambda: {f"flat {x.number}": x.flat for x in layers}


def tower_letters(number: int) -> tuple[list[str], list[str]]:
    """Of rank 0 and rank 1: two towers on one of them, one on the other."""
    draw = random.Random(13 * int(number) + 5)
    letters = draw.sample("PQRSTUVW", 3)
    both = letters[:2], letters[2:]
    return both[::-1] if draw.random() < 0.5 else both


def _towers(case: Case) -> Made:
    letters = tower_letters(case.number)[dist.get_rank() % 2]
    draw = random.Random(17 * int(case.number))
    # The first tower ends last: who waits for the second only, goes on too early.
    sizes = [(draw.choice((3, 4)), draw.choice((5, 6))), (2, 1)]
    towers = [
        Tower(letter, fetch_ms + case.more_ms, forward_ms)
        for letter, (fetch_ms, forward_ms) in zip(letters, sizes, strict=False)
    ]

    def combine() -> dict[str, torch.Tensor]:
        made = {x.letter: torch.zeros_like(x.out) for x in towers}
        with streams.annotate("combine"):
            for tower in towers:
                compute([tower.out], made[tower.letter], 1)
        return made

    return (towers,), combine


def _batches(case: Case) -> Made:
    sizes = [ms + case.more_ms for ms in (2, 2, 2, 3, 3, 3)]
    random.Random(19 * int(case.number) + 2).shuffle(sizes)
    hosts = [pinned(ms, float(i)) for i, ms in enumerate(sizes, start=1)]
    seen: dict[str, torch.Tensor] = {}

    def step(batch: torch.Tensor) -> None:
        index = len(seen) + 1
        streams.name_tensor(batch, f"batch {index}")
        seen[f"step {index}"] = out = torch.zeros(WIDTH, WIDTH, device=streams.device())
        with streams.annotate(f"step {index}"):
            compute([batch[:WIDTH]], out, 4)

    return (hosts, step), lambda: dict(seen)


_HANDED_OUT: Mapping[str, tuple[Callable[[Case], Made], Program]] = {
    "3.3a": (_layers, broken.send_gradients),
    "3.3b": (_towers, broken.look_up),
    "3.3c": (_batches, broken.train),
}


class Seen(Labelled):
    """One run of a case."""

    @property
    def timeline(self) -> Timeline:
        """Both ranks'."""
        return by_label(self.run.timeline)


class Case(NamedTuple):
    """One learner's broken program and what it works on."""

    exercise: str  # "3.3a"
    number: int  # the learner's
    num_ranks: int = NUM_RANKS
    more_ms: int = 0  # that each copy and message takes

    def run(self, program: Program) -> Seen:
        """Run `program` on this learner's objects."""
        return Seen.of(
            _case_on_rank, self, program, world_size=self.num_ranks, hardware=SLOW
        )

    def __str__(self) -> str:
        return (
            f"the objects of number {self.number}, {self.num_ranks} ranks, copies and "
            f"messages {self.more_ms} ms longer"
        )

    def as_handed_out(self) -> Seen:
        """Run the program as the lab hands it out, whatever was repaired since."""
        return _run_as_handed_out(self)


def _case_on_rank(case: Case, program: Program) -> origins.Held:
    with streams.annotate(SET_UP):
        arguments, results = _HANDED_OUT[case.exercise][0](case)
        streams.synchronize()

    def collected(_: object) -> dict[str, torch.Tensor]:
        tensors = results()
        with streams.annotate("collect"):
            return {name: t.clone() for name, t in tensors.items()}

    return origins.hold(program, *arguments, results=collected)


@lru_cache(maxsize=32)
def _run_as_handed_out(case: Case) -> Seen:
    return case.run(_HANDED_OUT[case.exercise][1])


# -- 3.4: training loops to feed

Step = Callable[[torch.Tensor], object]
Feed = Callable[[Sequence[torch.Tensor], Step], object]


class Loop(NamedTuple):
    """A training loop to feed."""

    name: str
    num_batches: int
    copy_ms: int  # from pinned memory
    step_ms: int
    reads_loss: bool  # `step` ends with `loss.item()`, so that the CPU waits
    num_ranks: int = NUM_RANKS


LOOPS = (
    Loop("every step reads its loss", 5, 3, 4, True),
    Loop("no step reads its loss", 6, 3, 4, False, num_ranks=3),
    Loop("copies take longer than steps", 5, 4, 2, True),
    Loop("one batch", 1, 2, 3, True),
)


class Fed(Labelled):
    """A loop that was fed; `values`: by rank, what each step computed."""

    @property
    def exposed_copy_ns(self) -> int:
        """How long rank 0 copies with no kernel beside it."""
        spans = [s for s in self.run.timeline.spans if s.rank == 0]
        copies = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "memcpy")
        kernels = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "compute")
        return total(subtract(copies, kernels))


def feed_loop(feed: Feed, loop: Loop = LOOPS[0]) -> Fed:
    """Run `feed(samples, step)` on the loop's ranks."""
    options: dict[str, Any] = {"world_size": loop.num_ranks, "hardware": SLOW}
    return Fed.of(_feed_on_rank, feed, loop, **options)


def _feed_on_rank(feed: Feed, loop: Loop) -> origins.Held:
    shape = (WIDTH * loop.copy_ms, WIDTH)
    samples = [
        torch.full(shape, 10.0 * dist.get_rank() + i, device="cpu")
        for i in range(1, loop.num_batches + 1)
    ]
    for i, sample in enumerate(samples, start=1):
        streams.name_tensor(sample, f"sample {i}")
    losses: list[torch.Tensor] = []

    def step(batch: torch.Tensor) -> float | None:
        number = len(losses) + 1
        streams.name_tensor(batch, f"batch {number}")
        out = torch.zeros(WIDTH, WIDTH, device=streams.device())
        with streams.annotate(f"step {number}"):
            compute([batch[:WIDTH], batch[-WIDTH:]], out, loop.step_ms)
            loss = out.mean()
            losses.append(loss)
            return loss.item() if loop.reads_loss else None

    return origins.hold(feed, samples, step, results=lambda _: losses)


# -- 3.5: chains on some streams

KINDS = ("kernels", "one chain", "batches")


def chains(kind: str) -> Job:
    """Six chains of three pieces: "kernels", "one chain" or "batches"."""
    if kind not in KINDS:
        raise ValueError(f"no job {kind!r}; expected one of {', '.join(KINDS)}")
    engines = (LOAD, COMPUTE, WIRE) if kind != "kernels" else 3 * (COMPUTE,)
    pieces = []
    for chain in range(1, 7):
        source: tuple[str, ...] = (INPUT,)
        if kind == "one chain" and chain > 1:
            source = (f"send {chain - 1}",)
        for word, on, ms in zip(
            ("load", "work", "send"), engines, (2, 3, 2), strict=True
        ):
            name = f"{word} {chain}"
            reads = () if on == LOAD and kind == "batches" else source
            pieces.append(Piece(name, on, ms, reads, name))
            source = (name,)
    return Job(kind, tuple(pieces))


@lru_cache(maxsize=32)
def on_streams(kind: str, number: int) -> Played:
    """The job `kind`, chain i on stream i mod `number`."""
    job = chains(kind)
    stream_of = {p.name: str(int(p.name.split()[1]) % number) for p in job.pieces}
    names = [str(i) for i in range(number)]
    return play(job, IssueOn(names, stream_of, job.waits_on(stream_of)))


def steps_ms(kind: str) -> dict[int, float]:
    """The step in ms on 1 to 6 streams."""
    return {number: on_streams(kind, number).step_ns / 1e6 for number in range(1, 7)}


# -- 3.6: the CPU waits for one collective

Finish = Callable[[Any, Any], object]


class Finished(Labelled):
    """A run in which the CPU had to wait for one collective."""

    def on(self, hardware: Hardware) -> Finished:
        """The same program on another clock."""
        return Finished(replace(self.run, timeline=resolve(self.program, hardware)))

    @property
    def sum_ns(self) -> int:
        """When the collective has ended on rank 0."""
        spans = self.run.timeline.of_rank(0).spans
        return max(s.end_ns for s in spans if s.kind == "communication")

    @property
    def cpu_ns(self) -> int:
        """When `finish` returned on rank 0."""
        spans = (s for s in self.run.timeline.of_rank(0).spans if s.lane == "cpu")
        ends = (s.end_ns for s in spans if s.attributes.get("label") == "finish")
        return max(ends, default=0)


def finish_with(number: int, finish: Finish, num_ranks: int = NUM_RANKS) -> Finished:
    """Launch an all-reduce under a side stream, call `finish(side, work)`, then read.

    The current stream has long work of its own; the number draws how long all take.
    """
    return Finished(
        run(_finish_on_rank, number, finish, world_size=num_ranks, hardware=SLOW)
    )


def _finish_on_rank(number: int, finish: Finish) -> float:
    draw = random.Random(23 * int(number) + 1)
    make_ms, sum_ms, other_ms = draw.choice((1, 2)), draw.choice((3, 4, 5)), 12
    with streams.annotate(SET_UP):
        start = torch.full((WIDTH, WIDTH), 1.0 + dist.get_rank())
        tensor = named_zeros("sum", WIDTH * sum_ms)
        other = torch.zeros(WIDTH, WIDTH, device=streams.device())
        streams.synchronize()
    side = streams.Stream()
    with streams.annotate("other work"):
        compute([start], other, other_ms)
    with streams.stream(side):
        with streams.annotate("make"):
            compute([start], tensor[:WIDTH], make_ms)
        with streams.annotate("sum"):
            work = dist.all_reduce(tensor, async_op=True)
    with streams.annotate("finish"):
        finish(side, work)
    with streams.annotate("read"), streams.stream(streams.Stream()):
        return float(tensor[0, 0].item())


# -- 3.7: eight nodes of one GPU, whose messages may go through the host's memory

KNOBS = {
    "staged": Knob((False, True), True, "through the host's memory"),
    "gbit_per_s": Knob((25, 100, 200, 400), 200, "network (Gbit/s)"),
    "batch_mib": Knob((1, 16, 64, 256, 512), 64, "batch (MiB)"),
    "ktokens": Knob((2, 4, 8, 16, 32), 8, "tokens per GPU (thousands)"),
}


def _timed(s: Settings) -> Timeline:
    """A step copies its next batch and sends each layer's gradients meanwhile."""
    base = find_hardware("h100-ib400")
    assert base.network is not None
    rate = s["gbit_per_s"] * 10**9 // 8
    hardware = replace(
        base,
        gpus_per_node=1,
        network=Link(base.network.latency_ns, rate, source="the knob"),
        network_staged=s["staged"],
        launch_ns=0,
        backward_launch_ns=0,
        collective_launch_ns=0,
        compute_rate_permille=1000,
        wire_rate_permille=1000,
        contention={},
        waits_for_room=False,
    )
    builder = ProgramBuilder(num_ranks=1, represents=8)
    size = s["batch_mib"] * 2**20
    builder.copy(0, "h2d", bytes=size, stream="loading", label="batch")
    square = 4096 * 4096
    for layer in range(6, 0, -1):
        for part in ("weights", "inputs"):  # a matmul for the gradient of each
            builder.compute(
                0,
                f"gradient of {part}",
                flops=2 * 1024 * s["ktokens"] * square,
                dtype="bfloat16",
                label=f"back {layer}",
            )
        builder.collective(0, "all_reduce", bytes=2 * square, label=f"send {layer}")
    return by_label(resolve(builder.build(), hardware))


turn = KnobProgram(KNOBS, _timed)
problem_with = turn.problem_with


def copy_ms(timeline: Timeline) -> float:
    """How long the batch's copy takes."""
    return sum(s.duration_ns for s in timeline.spans if s.kind == "memcpy") / 1e6
