"""Chains of blocks in whole MiB and ms, for the head: what each keeps, and a step.

A chain knows no tensor. `walk` runs a step of it and writes down what lives when: the
lane of memory in the lesson's figures, and what answers are judged by.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

from overlaplab.timeline import Memory, Span, Timeline

MIB = 2**20
_MS = 1_000_000


@dataclass(frozen=True)
class Block:
    """One block of a chain. Sizes are whole numbers of MiB.

    Args:
        input: what it gets from the block before; there until its backward has ended.
        inside: what its backward needs besides, made in its forward.
        work: what its backward needs for its own time: gradients, temporary results.
        ms: of its forward; computing it again takes as long, its backward twice as
            long.
    """

    input: int
    inside: int
    work: int
    ms: int


Kernel = tuple[str, int, int]  # name, start and end in ms
Moment = tuple[int, int, int]  # ms; MiB of activations and of temporaries from then on


def _play(
    blocks: Sequence[Block], again: Collection[int]
) -> tuple[list[Kernel], list[Moment]]:
    """All forwards, then all backwards, and what lives from when on."""
    kernels: list[Kernel] = []
    last: dict[int, Moment] = {}
    now, kept, temporary = 0, 0, 0

    def run(name: str, ms: int) -> None:
        nonlocal now
        kernels.append((name, now, now + ms))
        now += ms

    def holds(more: int, more_temporary: int = 0) -> None:
        # Of several changes at one time the last says what lives from then on; what
        # lives for no time at all is no peak.
        nonlocal kept, temporary
        kept, temporary = kept + more, temporary + more_temporary
        last[now] = (now, kept, temporary)

    for number, block in enumerate(blocks):
        holds(block.input + block.inside)
        run(f"F{number}", block.ms)
        if number in again:
            holds(-block.inside)
    for number, block in reversed([*enumerate(blocks)]):
        if number in again:
            holds(block.inside)
            run(f"F{number} again", block.ms)
        holds(0, block.work)
        run(f"B{number}", 2 * block.ms)
        holds(-block.inside - block.input, -block.work)
    return kernels, [*last.values()]


def walk(blocks: Sequence[Block], again: Collection[int]) -> Timeline:
    """A step: all forwards, then all backwards; blocks in `again` compute twice.

    Args:
        again: indices of blocks that drop their inside in the forward.
    """
    kernels, moments = _play(blocks, again)
    spans = [
        Span(0, "default", "compute", name, start * _MS, end * _MS)
        for name, start, end in kernels
    ]
    steps = tuple((ms * _MS, (a + t) * MIB) for ms, a, t in moments)
    kinds = (
        ("activations", tuple(a * MIB for _, a, _ in moments)),
        ("other", tuple(t * MIB for _, _, t in moments)),
    )
    return Timeline(
        tuple(spans),
        (None, *range(len(spans) - 1)),
        memory=(Memory(0, steps, kinds=kinds),),
    )


def peak_of(blocks: Sequence[Block], again: Collection[int]) -> int:
    """The most MiB that `walk` holds at once."""
    _, moments = _play(blocks, again)
    return max(a + t for _, a, t in moments)


def extra_ms(blocks: Sequence[Block], again: Collection[int]) -> int:
    """What is computed a second time."""
    return sum(blocks[number].ms for number in again)


def brute_force(blocks: Sequence[Block], budget: int) -> set[int] | None:
    """The fastest within `budget` MiB of all choices there are; None: none fits."""
    return best_by(lambda again: extra_ms(blocks, again), blocks, budget)


def best_by(
    cost: Callable[[Collection[int]], float], blocks: Sequence[Block], budget: int
) -> set[int] | None:
    """The choice within `budget` MiB with the least cost, of all there are."""
    numbers = range(len(blocks))
    every = [set(c) for n in range(len(blocks) + 1) for c in combinations(numbers, n)]
    fitting = [c for c in every if peak_of(blocks, c) <= budget]
    return min(fitting, key=lambda again: (cost(again), sorted(again)), default=None)


def largest_first(blocks: Sequence[Block], budget: int) -> set[int] | None:
    """A rule: the largest inside computes again, then the next, until it fits."""
    return _until_it_fits(blocks, budget, lambda block: -block.inside)


def cheapest_first(blocks: Sequence[Block], budget: int) -> set[int] | None:
    """A rule: the fewest ms per MiB first."""
    return _until_it_fits(blocks, budget, lambda block: block.ms / (block.inside or 1))


def _until_it_fits(
    blocks: Sequence[Block], budget: int, key: Callable[[Block], float]
) -> set[int] | None:
    order = sorted(range(len(blocks)), key=lambda number: key(blocks[number]))
    for count in range(len(blocks) + 1):
        if peak_of(blocks, order[:count]) <= budget:
            return set(order[:count])
    return None


def random_chain(num_blocks: int, seed: int) -> tuple[Block, ...]:
    """Unlike blocks, equal on every machine."""
    draw = random.Random(seed)
    return tuple(
        Block(
            draw.randint(1, 8),
            draw.choice((2, 5, 9, 20, 34, 60)) + draw.randint(0, 6),
            draw.randint(0, 30),
            draw.randint(1, 12),
        )
        for _ in range(num_blocks)
    )


# A U-net's way down and up: wide and cheap outside, narrow and dear inside.
UNEVEN = (
    Block(4, 40, 8, 4),
    Block(8, 34, 8, 3),
    Block(4, 18, 6, 6),
    Block(2, 30, 4, 5),
    Block(2, 26, 20, 2),
    Block(4, 20, 4, 4),
    Block(8, 12, 8, 3),
    Block(4, 8, 8, 2),
)
