"""What lab 04 gives in its extras: the ring, two broken programs, layers in chunks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.cluster.run import Run
from overlaplab.grading.answered import as_number
from overlaplab.grading.laws import Violation, regret
from overlaplab.hardware import Hardware
from overlaplab.program import Program, ProgramBuilder
from overlaplab_course.lab04.given import (
    COUNTER,
    NUM_RANKS,
    SIZES,
    Inputs,
    draws,
    matrix,
    play,
    products,
)

# -- section 7: the ring

ChunkToSend = Callable[[int, int, int], int]


def run_ring(tensor: Tensor, chunk_to_send: ChunkToSend) -> Tensor:
    """All-reduce `tensor` in place, by sends to the right and receives from the left.

    `chunk_to_send(rank, step, num_ranks)` says which chunk a rank sends in a step. In
    the first n - 1 steps what arrives is added, in the others it overwrites.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = tensor.view(-1).chunk(n)
    for step in range(2 * (n - 1)):
        outgoing = chunks[int(chunk_to_send(rank, step, n))].clone()
        target = chunks[int(chunk_to_send(left, step, n))]
        incoming = torch.empty_like(target)
        send = dist.P2POp(dist.isend, outgoing, right)
        receive = dist.P2POp(dist.irecv, incoming, left)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        if step < n - 1:
            target += incoming
        else:
            target.copy_(incoming)
    return tensor


def ring_inputs(num_ranks: int = NUM_RANKS) -> Inputs:
    """(tensor,) of each rank: 100,000 elements a chunk."""
    size = 100_000 * num_ranks
    return [(torch.randn(size, generator=draw),) for draw in draws(80, num_ranks)]


def play_ring(chunk_to_send: ChunkToSend, num_ranks: int = NUM_RANKS) -> Run:
    """`run_ring` on the board, 0.4 MB a chunk."""
    return play(run_ring, ring_inputs(num_ranks), chunk_to_send)


def no_chunk(chunk_to_send: ChunkToSend, num_ranks: int) -> list[Violation]:
    """The first answer that is no chunk of a ring."""
    for rank, step in product(range(num_ranks), range(2 * (num_ranks - 1))):
        answer: Any = chunk_to_send(rank, step, num_ranks)
        if as_number(answer) not in range(num_ranks):
            message = f"rank {rank} of {num_ranks}, step {step}: {answer!r}"
            expected = f"a whole number from 0 to {num_ranks - 1}"
            return [Violation("chunk", message, expected)]
    return []


# How often each rank's part is in each chunk: [rank][chunk][source].
Counts = list[list[Counter[int]]]


def simulate(chunk_to_send: ChunkToSend, num_ranks: int, steps: int) -> Counts:
    """What each rank holds after `steps`, counted, without any tensor."""
    ranks = range(num_ranks)
    held: Counts = [[Counter([rank]) for _ in ranks] for rank in ranks]
    for step in range(steps):
        sent = [int(chunk_to_send(rank, step, num_ranks)) for rank in ranks]
        messages = [held[rank][chunk].copy() for rank, chunk in enumerate(sent)]
        for rank, (chunk, message) in enumerate(zip(sent, messages, strict=True)):
            mine = held[(rank + 1) % num_ranks]
            mine[chunk] = message + (mine[chunk] if step < num_ranks - 1 else Counter())
    return held


# -- section 8: two repairs


class RepairCase(NamedTuple):
    """What belongs to one learner's number.

    Args:
        widths: of the side branch of each block.
        tokens: of each micro-batch.
        num_ranks: so many.
    """

    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    num_ranks: int = NUM_RANKS

    def blocks(self) -> Inputs:
        """(x, weights) of each rank; `weights[i]` has "in", "side" and "back"."""
        made = []
        for draw in draws(300, self.num_ranks):
            # The residual stream is the same on all ranks.
            same = torch.Generator().manual_seed(299)
            x = torch.randn(200, 400, generator=same)
            weights = [
                {
                    "in": matrix(400, 400, draw) / 2,
                    "side": matrix(400, width, same),
                    "back": matrix(width, 400, same),
                }
                for width in self.widths
            ]
            made.append((x, weights))
        return made

    def micros(self) -> Inputs:
        """([(a, b), ...],) of each rank: a @ b is a micro-batch's gradient."""
        return [(products(self.tokens, draw),) for draw in draws(400, self.num_ranks)]

    def __str__(self) -> str:
        sizes = f"widths {self.widths}, tokens {self.tokens}"
        return f"{self.num_ranks} ranks: {sizes}"

    def play_blocks(self, blocks: Callable[..., Tensor]) -> Run:
        """`blocks(x, weights)` on four ranks of the board."""
        return play(blocks, self.blocks())

    def play_micros(self, accumulate: Callable[..., Tensor]) -> Run:
        """`accumulate(micros)` on four ranks of the board."""
        return play(accumulate, self.micros())


@lru_cache(maxsize=16)
def repair_case(number: int) -> RepairCase:
    """The programs of a learner's number."""
    draw = random.Random(int(number))
    widths = tuple(draw.choice((250, 300, 350)) for _ in range(draw.choice((2, 3))))
    tokens = tuple(draw.choice((400, 500, 600)) for _ in range(3))
    return RepairCase(widths, tokens)


def repair_cases(number: int) -> tuple[RepairCase, RepairCase]:
    """What a learner's number draws; the same in other sizes, on three ranks."""
    own = repair_case(number)
    widths = tuple(width + 30 for width in own.widths)
    tokens = tuple(num - 60 for num in own.tokens)
    return own, RepairCase(widths, tokens, 3)


def luck_us(run: Run) -> float:
    """How long after its message's end the first unordered reader of rank 0 starts."""
    own = run.timeline.of_rank(0).spans
    spans = {s.attributes.get("op"): s for s in own if s.kind != "launch"}
    hazard = next(f for f in run.warnings if f.kind == "hazard" and f.rank == 0)
    message, reader = (spans[op] for op in hazard.ops)
    return (reader.start_ns - message.end_ns) / 1e3


# -- section 9: in how many chunks?

CHUNKS = (1, 2, 4, 8, 16)


class Case(NamedTuple):
    """One layer whose output is summed over the ranks, in us.

    Args:
        name: what it is like.
        compute_us: its matmul, undivided.
        overhead_us: what each chunk adds to that.
        latency_us: alpha, of each message.
        wire_us: the bytes of the whole output on the wire.
    """

    name: str
    compute_us: float
    overhead_us: float
    latency_us: float
    wire_us: float

    def step_us(self, chunks: int) -> float:
        """From the start of the matmul to the last sum.

        Each chunk's message travels beside the next chunk's matmul; the slower of the
        two sets the pace. A test holds this to the resolver.
        """
        compute = self.compute_us / chunks + self.overhead_us
        message = self.latency_us + self.wire_us / chunks
        return compute + (chunks - 1) * max(compute, message) + message

    @property
    def best(self) -> int:
        """The number of chunks with the shortest step."""
        return min(CHUNKS, key=self.step_us)

    def regret(self, chunks: int) -> float:
        """What a choice loses of what there is to gain."""
        steps = {n: round(1000 * self.step_us(n)) for n in CHUNKS}
        return regret(steps[chunks], min(steps.values()), max(steps.values()))

    def program(self, chunks: int) -> Program:
        """The same as a program; bytes are ns on the wire of `hardware()`."""
        builder, works = ProgramBuilder(num_ranks=1, represents=2), []
        compute_ns = round(1000 * (self.compute_us / chunks + self.overhead_us))
        num_bytes = round(1000 * self.wire_us / chunks)
        for _ in range(chunks):
            builder.compute(0, "matmul", ns=compute_ns)
            works.append(builder.collective(0, "all_reduce", bytes=num_bytes))
        for work in works:
            builder.wait(0, work)
        builder.compute(0, "next layer", ns=0)
        return builder.build()

    def hardware(self) -> Hardware:
        """`chalk` with one byte a ns and this latency."""
        latency_ns = round(1000 * self.latency_us)
        return replace(COUNTER, link=replace(COUNTER.link, latency_ns=latency_ns))


CASES = tuple(Case(*layer) for layer in SIZES["chunks"]["layers"])
