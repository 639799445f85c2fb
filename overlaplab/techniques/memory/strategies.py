"""Choices that people make by rule, for comparison with planned ones.

Plans are per block, see [Note: why a plan is per block] in chain.py: `segments` says
how to nest blocks where that pays.
"""

from __future__ import annotations

import math

from overlaplab.techniques.memory.arguments import whole_k
from overlaplab.techniques.memory.chain import Chain


def none(chain: Chain) -> tuple[int, ...]:
    """All blocks keep what they compute."""
    return (0,) * len(chain.blocks)


def every(chain: Chain, k: int = 1, policy: str = "recompute") -> tuple[int, ...]:
    """Every k-th block, the first one first, under `policy`; the others keep.

    Args:
        chain: the step.
        k: 1: every block.
        policy: a name of the menus.

    Raises:
        TypeError: `k` is no whole number.
        ValueError: `k` is less than 1; a block has no such policy.
    """
    k = whole_k(k)
    return tuple(
        0 if number % k else block.option(policy)
        for number, block in enumerate(chain.blocks)
    )


def segments(num_blocks: int, num_segments: int | None = None) -> tuple[range, ...]:
    """Consecutive blocks in segments as even as possible, the longer ones first.

    Args:
        num_blocks: of the chain.
        num_segments: None: about the root of `num_blocks`. With n equal blocks and k
            segments the step holds k inputs and the n / k blocks of one segment, least
            at k = sqrt(n) (Chen et al., 2016).

    Raises:
        ValueError: fewer than one segment, or more than blocks.

    >>> [len(segment) for segment in segments(9, 5)]
    [2, 2, 2, 2, 1]
    """
    if num_segments is None:
        num_segments = max(1, round(math.sqrt(num_blocks)))
    if not 1 <= num_segments <= max(1, num_blocks):
        raise ValueError(
            f"num_segments is {num_segments}; expected 1 to {num_blocks}, the number "
            "of blocks"
        )
    short, longer = divmod(num_blocks, num_segments)
    found, start = [], 0
    for number in range(num_segments):
        size = short + (number < longer)
        found.append(range(start, start + size))
        start += size
    return tuple(found)
