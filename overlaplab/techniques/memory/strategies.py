"""Choices that people make by rule, for comparison with planned ones.

Plans are per block, see [Note: why a plan is per block] in chain.py.
"""

from __future__ import annotations

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
