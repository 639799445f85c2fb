"""Exercises 4.6 and 4.7: the steps of a ring, and what a bandwidth means."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.cluster.run import Run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import Violation
from overlaplab_course.lab04.board import (
    NUM_RANKS,
    Inputs,
    play,
    sent_bytes,
    wire_bytes,
)

CHUNK = "each answer is a chunk, 0 to num_ranks - 1"
ONCE = "no part is added twice, on rings of 2 to 8"
HALF = "after n - 1 steps every rank has finished one chunk"
ALL = "after 2 (n - 1) steps every rank holds every sum"
RUNS = "sent by four ranks: right sums, and 2 (n - 1)/n of the tensor leaves each"
RIGHT = "the bus bandwidth of each measurement, within 1 %"

ChunkToSend = Callable[[int, int, int], int]
Held = list[list[dict[int, int]]]  # [rank][chunk]: how often it holds each rank's part


def run_ring(tensor: torch.Tensor, chunk_to_send: ChunkToSend) -> torch.Tensor:
    """All-reduce `tensor` in place, by sends to the right and receives from the left.

    `chunk_to_send(rank, step, num_ranks)` says which chunk a rank sends in a step. In
    the first n - 1 steps what arrives is added, in the others it overwrites.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = tensor.view(-1).chunk(n)
    for step in range(2 * (n - 1)):
        outgoing = chunks[chunk_to_send(rank, step, n)].clone()
        target = chunks[chunk_to_send(left, step, n)]
        incoming = torch.empty_like(target)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, right),
                dist.P2POp(dist.irecv, incoming, left),
            ]
        )
        for work in works:
            work.wait()
        if step < n - 1:
            target += incoming
        else:
            target.copy_(incoming)
    return tensor


def ring_inputs(numel: int = 400_000) -> Inputs:
    """(tensor,) of each of four ranks."""
    made = []
    for rank in range(NUM_RANKS):
        draw = torch.Generator().manual_seed(80 + rank)
        made.append((torch.randn(numel, generator=draw),))
    return made


def play_ring(chunk_to_send: ChunkToSend) -> Run:
    """`run_ring` on four ranks of the board, 1.6 MB."""
    return play(run_ring, ring_inputs(), chunk_to_send)


def simulate(
    chunk_to_send: ChunkToSend, num_ranks: int, steps: int | None = None
) -> Held:
    """What each rank holds after `steps` (None: all), counted, without any tensor."""
    held: Held = [[{rank: 1} for _ in range(num_ranks)] for rank in range(num_ranks)]
    for step in range(2 * (num_ranks - 1) if steps is None else steps):
        messages = []
        for rank in range(num_ranks):
            chunk = chunk_to_send(rank, step, num_ranks)
            messages.append((chunk, dict(held[rank][chunk])))
        for rank, (chunk, message) in enumerate(messages):
            mine = held[(rank + 1) % num_ranks][chunk]
            if step >= num_ranks - 1:
                mine.clear()
            for source, count in message.items():
                mine[source] = mine.get(source, 0) + count
    return held


def ring_of_ours(rank: int, step: int, num_ranks: int) -> int:
    """The course's own schedule: one formula for both halves."""
    return (rank - step) % num_ranks


def ring_text(chunk_to_send: ChunkToSend, num_ranks: int = NUM_RANKS) -> str:
    """A schedule as a table: what each rank sends, and what all hold at the end."""
    try:
        wrong = _no_chunk(chunk_to_send, num_ranks)
    except NotImplementedError:
        return "no schedule yet: chunk_to_send is not written"
    if wrong:
        return f"{wrong[0].message}; expected {wrong[0].expected}"
    lines = ["step      " + "".join(f"rank {r}  " for r in range(num_ranks))]
    for step in range(2 * (num_ranks - 1)):
        sent = [chunk_to_send(rank, step, num_ranks) for rank in range(num_ranks)]
        how = "adds" if step < num_ranks - 1 else "copies"
        lines.append(
            f"{step} {how:<8}" + "".join(f"{f'sends {c}':<8}" for c in sent).rstrip()
        )
    held = simulate(chunk_to_send, num_ranks)
    lines.append("at the end: parts of each chunk (4 is a sum, unless one came twice)")
    for rank, chunks in enumerate(held):
        counts = " ".join(_count(chunk) for chunk in chunks)
        lines.append(f"rank {rank}: {counts}")
    return "\n".join(lines)


def _count(chunk: dict[int, int]) -> str:
    twice = any(count > 1 for count in chunk.values())
    return f"{sum(chunk.values())}{'!' if twice else ''}"


@exercise(
    "4.6",
    title="the steps of a ring",
    solution="chunk_to_send",
    verifies=(CHUNK, ONCE, HALF, ALL, RUNS),
    points=2,
    optional=True,
    timeout_s=90.0,
)
def grade_ring(sheet: Sheet, chunk_to_send: ChunkToSend) -> None:
    """Counted for rings of 2 to 8, of 4 first, then run on 4."""
    for num_ranks in (NUM_RANKS, 2, 3, 5, 6, 7, 8):
        sheet.ran(f"your schedule on a ring of {num_ranks}")
        sheet.verify(CHUNK, _no_chunk(chunk_to_send, num_ranks))
        sheet.stop_if_wrong()
        half = simulate(chunk_to_send, num_ranks, num_ranks - 1)
        sheet.verify(ONCE, _twice(half))
        sheet.stop_if_wrong()
        sheet.verify(HALF, _none_finished(half))
        sheet.stop_if_wrong()
        held = simulate(chunk_to_send, num_ranks)
        sheet.verify(ONCE, _twice(held))
        sheet.stop_if_wrong()
        sheet.verify(ALL, _unfinished(held))
        sheet.stop_if_wrong()
    sheet.ran("your schedule on 4 ranks, 400000 elements")
    seen = play_ring(chunk_to_send)
    assert seen.program is not None
    sheet.show(
        seen.timeline.of_rank(0), step_ns=seen.timeline.step_ns, title="your ring"
    )
    inputs = ring_inputs()
    total = torch.stack([tensor for (tensor,) in inputs]).sum(0)
    wrong = laws.values_law(
        [{"the tensor": value} for value in seen.values], {"the tensor": total}
    )
    wanted = wire_bytes("all_reduce", NUM_RANKS, total.numel() * total.itemsize)
    for rank in range(NUM_RANKS):
        # Sends and receives are both in the record: each byte is counted twice.
        moved = sent_bytes(seen.program, rank) // 2
        if moved != wanted:
            wrong.append(
                Violation("bytes", f"rank {rank} sent {moved} bytes", str(wanted))
            )
    sheet.verify(RUNS, wrong)


def _no_chunk(chunk_to_send: ChunkToSend, num_ranks: int) -> list[Violation]:
    for rank in range(num_ranks):
        for step in range(2 * (num_ranks - 1)):
            answer: Any = chunk_to_send(rank, step, num_ranks)
            is_int = isinstance(answer, int) and not isinstance(answer, bool)
            if not is_int or not 0 <= answer < num_ranks:
                return [
                    Violation(
                        "chunk",
                        f"rank {rank} of {num_ranks}, step {step}: {answer!r}",
                        f"a whole number from 0 to {num_ranks - 1}",
                        "a ring has no end: % num_ranks",
                    )
                ]
    return []


def _twice(held: Held) -> list[Violation]:
    for rank, chunks in enumerate(held):
        for number, chunk in enumerate(chunks):
            for source, count in sorted(chunk.items()):
                if count > 1:
                    return [
                        Violation(
                            "twice",
                            f"on a ring of {len(held)}, chunk {number} on rank {rank} "
                            f"has the part of rank {source} {count} times",
                            "once",
                            "in step 1 send what you just added to",
                        )
                    ]
    return []


def _none_finished(half: Held) -> list[Violation]:
    for rank, chunks in enumerate(half):
        most = max(len(chunk) for chunk in chunks)
        if most < len(half):
            return [
                Violation(
                    "unfinished",
                    f"on a ring of {len(half)}, after {len(half) - 1} steps the best "
                    f"chunk of rank {rank} has {most} of {len(half)} parts",
                    f"one chunk with all {len(half)}",
                    "in step 1 send what you just added to",
                )
            ]
    return []


def _unfinished(held: Held) -> list[Violation]:
    for rank, chunks in enumerate(held):
        for number, chunk in enumerate(chunks):
            if len(chunk) < len(held):
                return [
                    Violation(
                        "unfinished",
                        f"on a ring of {len(held)}, rank {rank} ends with {len(chunk)} "
                        f"of {len(held)} parts in chunk {number}",
                        f"all {len(held)}",
                        "after n - 1 steps rank r has finished one chunk: which? It "
                        "sends that one next",
                    )
                ]
    return []


# -- bandwidth


@lru_cache(maxsize=1)
def _points() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(
        Path(__file__).with_name("points.json").read_text()
    )
    return stored


def measured_points() -> list[tuple[int, int, float]]:
    """(ranks, bytes, us) of all-reduces measured alone; see `points_machine`."""
    return [(n, size, us) for n, size, us in _points()["points"]]


def points_machine() -> str:
    """The machine on which they were measured."""
    return "{card}, torch {torch}, NCCL {nccl}, {date}".format(**_points())


def bus_of_ours(operation: str, num_ranks: int, num_bytes: int, us: float) -> float:
    """Bytes that cross one rank's link, in 1e9 a second."""
    return wire_bytes(operation, num_ranks, num_bytes) / (us * 1e3)


# (operation, ranks, bytes, us): invented, unlike any stored point.
CASES: Sequence[tuple[str, int, int, float]] = (
    ("all_reduce", 2, 10_000_000, 100.0),
    ("all_reduce", 8, 64_000_000, 400.0),
    ("all_gather", 8, 64_000_000, 200.0),
    ("reduce_scatter", 4, 48_000_000, 90.0),
    ("broadcast", 4, 30_000_000, 120.0),
    ("all_to_all", 16, 16_000_000, 300.0),
)


@exercise(
    "4.7",
    title="bus bandwidth",
    solution="bus_gbyte_per_s",
    verifies=(RIGHT,),
    points=1,
    optional=True,
    timeout_s=10.0,
)
def grade_bus(sheet: Sheet, bus_gbyte_per_s: Callable[..., Any]) -> None:
    """As nccl-tests define it, on measurements that the lesson does not show."""
    sheet.ran(f"your function on {len(CASES)} invented measurements")
    for operation, num_ranks, size, us in CASES:
        wire = wire_bytes(operation, num_ranks, size)
        right = bus_of_ours(operation, num_ranks, size, us)
        answer = bus_gbyte_per_s(operation, num_ranks, size, us)
        usable = (
            isinstance(answer, (int, float)) and abs(answer - right) <= 0.01 * right
        )
        whole = size / (us * 1e3)
        sheet.expect(
            RIGHT,
            bool(usable),
            seen=f"{operation}, {size} bytes, {num_ranks} ranks, {us:g} us: {answer!r}",
            expected=f"{right:.4g} GB/s: {wire} bytes cross a link",
            hint=_bus_hint(answer, right, whole),
        )


def _bus_hint(answer: object, right: float, whole: float) -> str:
    if not isinstance(answer, (int, float)):
        return "return a number"
    if abs(answer - whole) <= 0.01 * whole:
        return "that is size over time; how often does a byte cross a link?"
    for factor in (1e-3, 1e3, 1e6, 1e9):
        if abs(answer - factor * right) <= 0.01 * factor * right:
            return "GB/s are 1e9 bytes a second; the time is in microseconds"
    return (
        "which collectives send a byte 2 (n - 1)/n times, which (n - 1)/n, which once?"
    )
