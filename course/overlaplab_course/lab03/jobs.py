"""Jobs as data: pieces of work, the buffers that they touch, and who must wait.

Knows no torch and no cluster; `overlaplab_course.lab03.play` runs a job.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

COMPUTE, WIRE, LOAD = "compute", "wire", "load"
INPUT = "input"  # the buffer that the caller fills before a job begins

Wait = tuple[str, str]  # (who must have ended, who waits for it)


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of work.

    Args:
        name: "back 3".
        on: what works on it: "compute", "wire" or "load".
        ms: how long it takes alone, in the lab's slow motion.
        reads: names of the buffers that it reads.
        writes: name of the one that it writes.
    """

    name: str
    on: str
    ms: int
    reads: tuple[str, ...]
    writes: str


@dataclass(frozen=True)
class Job:
    """Pieces in the order in which they are launched; it prints as a table.

    Args:
        name: for messages.
        pieces: a piece reads what earlier ones wrote, or the input.
    """

    name: str
    pieces: tuple[Piece, ...]

    @cached_property
    def _needs(self) -> dict[str, tuple[str, ...]]:
        writer: dict[str, str] = {}
        readers: dict[str, list[str]] = {}
        needs: dict[str, tuple[str, ...]] = {}
        for piece in self.pieces:
            found = [writer[b] for b in piece.reads if b in writer]
            found += readers.get(piece.writes, [])
            if piece.writes in writer and not readers.get(piece.writes):
                found.append(writer[piece.writes])
            order = [p.name for p in self.pieces]
            needs[piece.name] = tuple(sorted(set(found), key=order.index))
            for buffer in piece.reads:
                readers.setdefault(buffer, []).append(piece.name)
            writer[piece.writes] = piece.name
            readers[piece.writes] = []
        return needs

    def needs(self, name: str) -> tuple[str, ...]:
        """Names of the pieces that must have ended before the piece `name` starts.

        Who wrote last what it reads, who read since then what it overwrites, and who
        wrote that last if nobody read it. Everything earlier they have waited for.
        """
        return self._needs[name]

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Every need that is on another stream, in launch order."""
        on = {p.name: p.on for p in self.pieces}
        return tuple(
            (need, p.name)
            for p in self.pieces
            for need in self.needs(p.name)
            if on[need] != p.on
        )

    def __str__(self) -> str:
        width = max(5, *(len(p.name) for p in self.pieces)) + 2
        rows = [f"{'piece':<{width}}{'on':<9}{'alone':>6}  must come after"]
        rows += [
            f"{p.name:<{width}}{p.on:<9}{p.ms:>3} ms  "
            + (", ".join(self.needs(p.name)) or "the input")
            for p in self.pieces
        ]
        return "\n".join(rows)

    def __repr__(self) -> str:
        return str(self)


def fewest_waits(job: Job) -> tuple[Wait, ...]:
    """The waits that no chain of stream order and other waits implies."""
    edges = {*job.waits, *_stream_order(job.pieces)}
    return tuple(w for w in job.waits if not _implied(w, edges - {w}))


def _stream_order(pieces: Sequence[Piece]) -> Iterator[Wait]:
    last: dict[str, str] = {}
    for piece in pieces:
        if piece.on in last:
            yield last[piece.on], piece.name
        last[piece.on] = piece.name


def _implied(wait: Wait, edges: Iterable[Wait]) -> bool:
    """Whether `edges` lead from the one to the other."""
    first, goal = wait
    nexts: dict[str, list[str]] = {}
    for a, b in edges:
        nexts.setdefault(a, []).append(b)
    todo, seen = [first], {first}
    while todo:
        for name in nexts.get(todo.pop(), ()):
            if name == goal:
                return True
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return False


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


def drawn_job(seed: int, num_pieces: int = 12) -> Job:
    """A job on two streams, by lot: each piece reads one or two of the last five."""
    draw = random.Random(seed)
    pieces: list[Piece] = []
    for number in range(num_pieces):
        on = draw.choice((COMPUTE, COMPUTE, WIRE)) if number else COMPUTE
        recent = [p.writes for p in pieces[-5:]]
        reads = draw.sample(recent, min(len(recent), draw.choice((1, 1, 2))))
        if not reads or draw.random() < 0.15:
            reads = [INPUT]
        letter = "c" if on == COMPUTE else "w"
        name = f"{letter}{number}"
        pieces.append(Piece(name, on, draw.randint(1, 4), tuple(reads), f"of {name}"))
    return Job(f"by lot, no. {seed}", tuple(pieces))


def pipeline_job(number: int, num_batches: int = 3) -> Job:
    """Batches that are loaded, worked on and sent, on three streams.

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
    for i in range(1, num_batches + 1):
        slot = "AB"[(i - 1) % 2]
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
    return Job(f"three streams, no. {number}", tuple(pieces))
