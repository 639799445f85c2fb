"""The fastest choice of a policy for each block under a budget: one knapsack.

Blocks are decided from the first to the last. All that later blocks need to know of
earlier ones is how many bytes these keep, so of two beginnings that keep equally much
only the faster matters, and one that keeps more must be faster (Bellman's principle;
Rotor, Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, plans in
the same setting, with recomputation of recomputation). The choice is the optimum, not
an approximation, while chains have up to `EXACT_BLOCKS` blocks or few distinct menus;
for others what is kept is rounded up to 1/8192 of the whole, still never over budget.

Knows no tensor and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlaplab.errors import OverlaplabError
from overlaplab.techniques.memory.chain import Chain

EXACT_BLOCKS = 256
_EXACT_MENUS = 3
_CELLS = 8192
_NO_BUDGET = np.iinfo(np.int64).max // 4
Numbers = NDArray[np.int64]


class BudgetError(OverlaplabError):
    """No choice fits into the budget.

    Attributes:
        least_bytes: what would.
    """

    def __init__(self, message: str, *, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class _Level:
    """Where each beginning came from that is one block longer than those before."""

    parents: Numbers
    options: NDArray[np.int8]


def choose(chain: Chain, budget_bytes: int) -> tuple[int, ...]:
    """For each block the place of an option: the fastest step within the budget.

    Args:
        chain: the step.
        budget_bytes: the most that may live at once.

    Returns:
        A choice whose `chain.peak_bytes` is at most the budget. A larger budget never
        gives a slower one.

    Raises:
        BudgetError: there is none; the error has the least budget that works.
    """
    choice = None
    if chain.ends_bytes <= budget_bytes:
        choice = _walk(chain, budget_bytes)
    if choice is None:
        least = chain.peak_bytes(least_choice(chain))
        raise BudgetError(
            f"budget_bytes is {budget_bytes:,}, but the smallest peak that these "
            f"policies reach is {least:,} bytes. Raise the budget to that, or make the "
            "batch smaller",
            least_bytes=least,
        )
    return choice


def least_choice(chain: Chain) -> tuple[int, ...]:
    """The choice with the smallest peak, of those the one that keeps least."""
    found = _walk(chain, _NO_BUDGET, of_peak=True)
    assert found is not None
    return found


def _walk(
    chain: Chain, budget: int, *, of_peak: bool = False
) -> tuple[int, ...] | None:
    """From the first block to the last, all beginnings that may become the best.

    Args:
        of_peak: the cost is the peak so far, else the time so far.
    """
    unit = _unit_bytes(chain)
    kept, cost = np.zeros(1, np.int64), np.zeros(1, np.int64)
    levels: list[_Level] = []
    for number, block in enumerate(chain.blocks):
        parts: list[tuple[Numbers, Numbers, Numbers, NDArray[np.int8]]] = []
        for place, option in enumerate(block.options):
            need = kept + chain.need_bytes(number, option)
            (fits,) = np.nonzero(need <= budget)
            own = -(-option.kept_bytes // unit) * unit
            so_far = np.maximum(cost, need) if of_peak else cost + option.step_ns
            parts.append(
                (
                    kept[fits] + own,
                    so_far[fits],
                    fits,
                    np.full(len(fits), place, np.int8),
                )
            )
        kept, cost, parents, options = map(np.concatenate, zip(*parts, strict=True))
        best = _undominated(kept, cost)
        if not len(best):
            return None
        kept, cost = kept[best], cost[best]
        levels.append(_Level(parents[best], options[best]))
    place = int(np.argmin(cost))
    choice = []
    for level in reversed(levels):
        choice.append(int(level.options[place]))
        place = int(level.parents[place])
    return tuple(reversed(choice))


def _undominated(kept: Numbers, cost: Numbers) -> NDArray[np.intp]:
    """Places of those than which no other keeps as little at as small a cost."""
    order = np.lexsort((cost, kept))
    sorted_cost = cost[order]
    least_before = np.concatenate(
        (
            np.full(1, np.iinfo(np.int64).max, np.int64),
            np.minimum.accumulate(sorted_cost)[:-1],
        )
    )[: len(order)]
    return order[sorted_cost < least_before]


def _unit_bytes(chain: Chain) -> int:
    """What kept bytes are rounded up to. The same for every budget."""
    num_menus = len({block.options for block in chain.blocks})
    if len(chain.blocks) <= EXACT_BLOCKS or num_menus <= _EXACT_MENUS:
        return 1
    most = sum(max(o.kept_bytes for o in b.options) for b in chain.blocks)
    return max(1, -(-most // _CELLS))
