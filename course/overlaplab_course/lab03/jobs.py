"""Jobs in slow motion: pieces of work as data, and how they are played on two ranks.

A unit of work takes 1 ms, whatever works on it. A learner's function gets the pieces as
tasks to launch; what the streams did is on the timeline.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading.forms import Examined
from overlaplab.grading.orders import disagree
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.timeline import Span, Timeline
from overlaplab.view import Table

COMPUTE, WIRE, LOAD = "compute", "wire", "load"
INPUT = "input"  # the buffer that the caller fills before a job begins
NUM_RANKS = 2
SET_UP = "set up"
WIDTH = 64  # buffers are 64 x 64 and more rows where the wire needs more bytes
_UNIT_BYTES = 4 * WIDTH * WIDTH  # 1 ms of a wire or of a copy
_UNIT_FLOPS = 2 * WIDTH**3  # 1 ms of computing

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

EAGER = replace(
    SLOW,
    name="slow motion, slow launches and wire",
    link=replace(SLOW.link, bytes_per_s=SLOW.link.bytes_per_s // 2),
    launch_ns=500_000,
    collective_launch_ns=500_000,
    source="round numbers: a launch takes 0.5 ms, a unit of sending 2 ms",
)

SLOW_COPIES = replace(
    EAGER,
    name="slow motion, slow launches and copies",
    host_bytes_per_s=500 * _UNIT_BYTES,
    pageable_bytes_per_s=250 * _UNIT_BYTES,
    source="round numbers: a launch takes 0.5 ms, a unit of sending or copying 2 ms",
)

Wait = tuple[str, str]  # (who must have ended, who waits for it)


class Piece(NamedTuple):
    """One piece of work, and the buffers that it reads and writes, by name."""

    name: str  # "back 3"
    on: str  # what works on it: "compute", "wire" or "load"
    ms: int  # how long it takes alone
    reads: tuple[str, ...]
    writes: str


@dataclass(frozen=True, repr=False)
class Job:
    """Pieces in the order in which they are launched; it prints as a table."""

    name: str
    pieces: tuple[Piece, ...]  # each reads what earlier ones wrote, or the input

    @cached_property
    def needs(self) -> Mapping[str, tuple[str, ...]]:
        """By piece, the names of those that must have ended before it starts.

        Who wrote last what it reads, who read since then what it overwrites, and who
        wrote that last if nobody read it. Everything earlier they have waited for.
        """
        writer: dict[str, str] = {}
        readers: dict[str, list[str]] = {}
        needs: dict[str, tuple[str, ...]] = {}
        order = [p.name for p in self.pieces]
        for piece in self.pieces:
            found = [writer[b] for b in piece.reads if b in writer]
            found += readers.get(piece.writes, [])
            if piece.writes in writer and not readers.get(piece.writes):
                found.append(writer[piece.writes])
            needs[piece.name] = tuple(sorted(set(found), key=order.index))
            for buffer in piece.reads:
                readers.setdefault(buffer, []).append(piece.name)
            writer[piece.writes], readers[piece.writes] = piece.name, []
        return needs

    def waits_on(self, stream_of: Mapping[str, str]) -> list[Wait]:
        """Every need that is on another stream, in launch order."""
        return [
            (need, name)
            for name, needs in self.needs.items()
            for need in needs
            if stream_of[need] != stream_of[name]
        ]

    def __repr__(self) -> str:
        rows = (
            (p.name, p.on, f"{p.ms} ms", ", ".join(self.needs[p.name]) or "the input")
            for p in self.pieces
        )
        head = ("piece", "on", "alone", "must come after")
        return str(Table(head, tuple(rows), left=4))


# -- playing


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


class Labelled(Examined):
    """A run whose spans have the names of what they are part of."""

    @property
    def timeline(self) -> Timeline:
        """Rank 0's (all do the same)."""
        return by_label(self.run.timeline).of_rank(0)


@dataclass(frozen=True)
class Played(Labelled):
    """A job, played; `values`: by rank and buffer, what is in it at the end."""

    job: Job


def play(
    job: Job,
    issue: Issue,
    hardware: Hardware = SLOW,
    num_ranks: int = NUM_RANKS,
    apart: bool = False,
) -> Played:
    """Run `issue(tasks)` for `job` on two ranks.

    The caller's stream writes the input before, and reads every buffer after.
    With `apart` a set has another order on each rank, see `overlaplab.grading.orders`.
    """
    ran = run(_on_rank, job, issue, apart, world_size=num_ranks, hardware=hardware)
    return Played(ran, job)


def _on_rank(job: Job, issue: Issue, apart: bool) -> dict[str, torch.Tensor]:
    if apart:
        issue = disagree(issue)
    with streams.annotate(SET_UP):
        rows = {INPUT: WIDTH}
        for piece in job.pieces:
            units = 1 if piece.on == COMPUTE else piece.ms
            rows[piece.writes] = max(rows.get(piece.writes, 0), WIDTH * units)
        buffers = {name: named_zeros(name, number) for name, number in rows.items()}
        streams.synchronize()  # what follows need not wait for it
    seed = torch.Generator().manual_seed(dist.get_rank())
    start = torch.randn(WIDTH, WIDTH, generator=seed)
    with streams.annotate("input"):
        compute([start], buffers[INPUT], 1)
    issue([_make_task(job, piece, buffers) for piece in job.pieces])
    values = {name: buffer[:WIDTH] for name, buffer in buffers.items()}
    with streams.annotate("collect"):
        compute(list(values.values()), torch.empty(WIDTH, WIDTH), 1)
    return {name: value.clone() for name, value in values.items()}


def _make_task(job: Job, piece: Piece, buffers: Mapping[str, torch.Tensor]) -> Task:
    inputs = [buffers[name][:WIDTH] for name in piece.reads]
    output = buffers[piece.writes]
    if piece.on == LOAD:
        host = pinned(piece.ms, 0.1 * (1 + job.pieces.index(piece)))

    def launch() -> None:
        with streams.annotate(piece.name):
            if piece.on == COMPUTE:
                compute(inputs, output, piece.ms)
            elif piece.on == WIRE:
                output[:WIDTH].copy_(sum(inputs[1:], start=inputs[0]))
                dist.all_reduce(output[: WIDTH * piece.ms])
            else:
                output[: WIDTH * piece.ms].copy_(host, non_blocking=True)

    return Task(piece.name, piece.on, job.needs[piece.name], launch)


def named_zeros(name: str, rows: int = WIDTH) -> torch.Tensor:
    """Zeros on the device, called `name` in findings."""
    made = torch.zeros(rows, WIDTH, device=streams.device())
    streams.name_tensor(made, name)
    return made


def pinned(units: int, value: float) -> torch.Tensor:
    """What takes `units` ms to copy to the device: pinned memory of the host."""
    return torch.full((WIDTH * units, WIDTH), value, device="cpu").pin_memory()


def compute(inputs: Sequence[torch.Tensor], output: torch.Tensor, units: int) -> None:
    """One kernel of `units` milliseconds that reads all of `inputs`."""
    factor = torch.full((1, 1), 0.01, device=output.device)
    a, b = factor.expand(WIDTH, WIDTH * units), factor.expand(WIDTH * units, WIDTH)
    torch.addmm(sum(inputs[1:], start=inputs[0]), a, b, out=output)


def by_label(timeline: Timeline) -> Timeline:
    """The same with labels in the place of operators' names: figures print them.

    Messages without one are numbered as in findings. What the CPU does keeps its name;
    what it did before the job is left out.
    """
    timeline = timeline.where(lambda span: span.attributes.get("label") != SET_UP)
    messages = [s for s in timeline.spans if s.kind == "communication"]
    ops = sorted({(s.rank, int(s.attributes["op"])) for s in messages})
    first = {rank: place for place, (rank, _) in reversed(list(enumerate(ops)))}

    def shown(span: Span) -> str:
        if span.attributes.get("label"):
            return str(span.attributes["label"])
        if span.kind != "communication":
            return span.name
        place = ops.index((span.rank, int(span.attributes["op"])))
        return f"{span.name} #{place - first[span.rank]}"

    spans = (
        s if s.kind in ("launch", "host") else replace(s, name=shown(s))
        for s in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


@dataclass(frozen=True)
class IssueOn:
    """Issue tasks on streams by name, with an event for each wait."""

    side: Sequence[str]  # streams to make; any other name is the caller's
    stream_of: Mapping[str, str]
    waits: Sequence[Wait]

    def __call__(self, tasks: Iterable[Task]) -> None:
        caller = streams.current_stream()
        side = {name: streams.Stream() for name in self.side}
        for stream in side.values():
            stream.wait_stream(caller)
        ended: dict[str, Any] = {}
        for task in tasks:
            own = side.get(self.stream_of[task.name], caller)
            for first, then in self.waits:
                if then == task.name:
                    own.wait_event(ended[first])
            with streams.stream(own):
                task.run()
            ended[task.name] = own.record_event()
        for stream in side.values():
            caller.wait_stream(stream)


def one_stream(tasks: Sequence[Task]) -> None:
    """Everything on the caller's stream, in launch order."""
    for task in tasks:
        task.run()


# -- jobs: the lesson's, and those that its graders draw


def backward_job() -> Job:
    """Four layers: each backward, its message, its update. Launched as they come."""
    layers = (4, 3, 2, 1)
    before = {4: INPUT} | {layer: f"b{layer + 1}" for layer in (3, 2, 1)}
    send_ms = {4: 2, 3: 4, 2: 3, 1: 2}
    back = {n: Piece(f"back {n}", COMPUTE, 3, (before[n],), f"b{n}") for n in layers}
    send = {
        n: Piece(f"send {n}", WIRE, send_ms[n], (f"b{n}",), f"s{n}") for n in layers
    }
    update = {n: Piece(f"opt {n}", COMPUTE, 1, (f"s{n}",), f"u{n}") for n in layers}
    order = [back[4], send[4], back[3], send[3], update[4], back[2], send[2]]
    order += [update[3], back[1], send[1], update[2], update[1]]
    return Job("four layers", tuple(order))


def three_tasks(first_ms: int, second_ms: int, message_ms: int) -> Job:
    """`message` needs `first`; `second`, launched between them, is needed by nobody."""
    return Job(
        f"three tasks of {first_ms}, {second_ms} and {message_ms} ms",
        (
            Piece("first", COMPUTE, first_ms, (INPUT,), "a"),
            Piece("second", COMPUTE, second_ms, (INPUT,), "b"),
            Piece("message", WIRE, message_ms, ("a",), "sum"),
        ),
    )


def drawn_job(seed: int, num_pieces: int = 12) -> Job:
    """A random job on two streams: each piece reads one or two of the last five."""
    draw = random.Random(seed)
    pieces: list[Piece] = []
    for number in range(num_pieces):
        on = draw.choice((COMPUTE, COMPUTE, WIRE)) if number else COMPUTE
        recent = [p.writes for p in pieces[-5:]]
        reads = draw.sample(recent, min(len(recent), draw.choice((1, 1, 2))))
        if not reads or draw.random() < 0.15:
            reads = [INPUT]
        name = f"{'c' if on == COMPUTE else 'w'}{number}"
        pieces.append(Piece(name, on, draw.randint(1, 4), tuple(reads), f"of {name}"))
    return Job(f"random, no. {seed}", tuple(pieces))


class Pipeline(Job):
    """One learner's job on three streams."""

    @property
    def every_wait(self) -> list[Wait]:
        """A wait for each need on another stream: enough, and too many."""
        return self.waits_on({piece.name: piece.on for piece in self.pieces})

    def play(self, waits: Iterable[Wait]) -> Played:
        """Run the job with these waits.

        Raises:
            ValueError: a wait names no task, or one that is launched later.
        """
        waits = list(waits)
        if problems := self.misfits(waits):
            raise ValueError(problems[0])
        stream_of = {piece.name: piece.on for piece in self.pieces}
        return play(self, IssueOn((WIRE, LOAD), stream_of, waits))

    def misfits(self, waits: Iterable[Wait]) -> list[str]:
        """What is wrong with waits that are no pair of tasks in launch order."""
        order = [p.name for p in self.pieces]
        found = []
        for wait in waits:
            names = tuple(wait) if isinstance(wait, (tuple, list)) else (wait,)
            if len(names) != 2 or any(name not in order for name in names):
                found.append(f"{wait!r} is no pair of tasks of this job")
            elif order.index(names[0]) >= order.index(names[1]):
                found.append(
                    f"{wait!r}: {names[0]!r} is launched after {names[1]!r}, so its "
                    "event is not recorded yet; a GPU would not wait at all"
                )
        return found


def fewest_waits(job: Pipeline) -> list[Wait]:
    """The waits that no chain of stream order and other waits implies."""
    fewest: list[Wait] = []
    behind: dict[str, set[str]] = {}  # what has ended before a piece starts
    last: dict[str, str] = {}
    for piece in job.pieces:
        waits = [wait for wait in job.every_wait if wait[1] == piece.name]
        before = {first for first, _ in waits} | {last.get(piece.on, piece.name)}
        before.discard(piece.name)
        implied = set[str]().union(*(behind[name] for name in before))
        fewest += [wait for wait in waits if wait[0] not in implied]
        behind[piece.name] = implied | before
        last[piece.on] = piece.name
    return fewest


@lru_cache(maxsize=16)
def pipeline(number: int) -> Pipeline:
    """Batches that are loaded, worked on and sent: the job of a learner's number.

    Two buffers of each kind take turns, so batch 3 overwrites what batch 1 used. The
    number draws how long the pieces take and what else reads the buffers.
    """
    draw = random.Random(7 * int(number) + 1)
    labels_too, counts_sent, norm_last = (draw.random() < 0.5 for _ in range(3))
    if not (labels_too or counts_sent):
        counts_sent = True
    load_ms, send_ms = draw.choice(((2, 3), (3, 2), (2, 2)))
    pieces: list[Piece] = []
    updates: list[Piece] = []
    for i, slot in enumerate("ABA", start=1):
        batch = [f"batch {slot}"] + ([f"labels {slot}"] if labels_too else [])
        pieces.append(Piece(f"load {i}", LOAD, load_ms, (), batch[0]))
        if labels_too:
            pieces.append(Piece(f"labels {i}", LOAD, 1, (), batch[1]))
        work_ms = draw.choice((3, 4, 5))
        pieces.append(Piece(f"work {i}", COMPUTE, work_ms, tuple(batch), f"out {slot}"))
        sent = (f"out {slot}", *(batch[-1:] if counts_sent else ()))
        pieces.append(Piece(f"send {i}", WIRE, send_ms, sent, f"sum {slot}"))
        if updates:
            pieces.append(updates.pop())
        updates.append(Piece(f"update {i}", COMPUTE, 1, (f"sum {slot}",), "weights"))
    pieces += updates
    if norm_last:
        pieces.append(Piece("norm", WIRE, 1, ("weights", "out A", "out B"), "norm"))
    return Pipeline(f"three streams, no. {number}", tuple(pieces))
