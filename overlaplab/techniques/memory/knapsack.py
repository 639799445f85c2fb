"""The fastest choice of a policy for each block, for every budget: one knapsack.

Blocks are decided from the last to the first. What earlier blocks keep is memory that
later ones lack, so all that a row of last blocks asks of the earlier ones is room: with
an option that needs n bytes and keeps k, before blocks that need r, a block needs
max(n, k + r). Of two endings that need equal room only the faster matters, and one that
needs more must be faster (Bellman's principle; Rotor, Beaumont et al., "Optimal
checkpointing for heterogeneous chains", 2019, plans in the same setting, with
recomputation of recomputation). What is left at the first block is the whole curve.

It is the optimum for every budget while endings are at most `MOST_ENDINGS`; of more the
smallest and the fastest of each of so many equal ranges of bytes stay: peaks are exact
then, too, and steps may be a little longer than they had to be.

Knows no tensor and no policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlaplab.errors import OverlaplabError
from overlaplab.techniques.memory.chain import Chain

MOST_ENDINGS = 8192
Numbers = NDArray[np.int64]


class BudgetError(OverlaplabError):
    """No choice fits into the budget.

    Attributes:
        least_bytes: what would.
    """

    def __init__(self, message: str, *, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def too_small(budget_bytes: int, least_bytes: int) -> BudgetError:
    """The error that says what would do."""
    return BudgetError(
        f"budget_bytes is {budget_bytes:,}, but the smallest peak that these policies "
        f"reach is {least_bytes:,} bytes. Raise the budget to that, or make the batch "
        "smaller",
        least_bytes=least_bytes,
    )


@dataclass(frozen=True)
class _Level:
    """Of each ending that begins at a block: its option, and the ending behind it."""

    options: NDArray[np.int8]
    endings: NDArray[np.int32]


@dataclass(frozen=True)
class Curve:
    """All choices worth having, by rising peak and falling step.

    Args:
        peak_bytes: of each, rising.
        step_ns: of each, falling.
        is_exact: none was left out for their number.
    """

    peak_bytes: Numbers
    step_ns: Numbers
    is_exact: bool
    _levels: tuple[_Level, ...]

    def choice(self, place: int) -> tuple[int, ...]:
        """The choice of a place on the curve."""
        found = []
        for level in self._levels:
            found.append(int(level.options[place]))
            place = int(level.endings[place])
        return tuple(found)

    def choose(self, budget_bytes: int) -> tuple[int, ...]:
        """For each block the place of an option: the fastest step within the budget.

        A larger budget never gives a slower one.

        Raises:
            BudgetError: there is none; the error has the least budget that works.
        """
        place = int(np.searchsorted(self.peak_bytes, budget_bytes, "right")) - 1
        if place < 0:
            raise too_small(budget_bytes, int(self.peak_bytes[0]))
        return self.choice(place)

    def spread(self, most: int) -> Iterator[int]:
        """Places, the fastest first: at most about `most`, as far apart as can be."""
        stride = int(self.peak_bytes[-1] - self.peak_bytes[0]) // most
        next_bytes = int(self.peak_bytes[-1])
        for place in range(len(self.peak_bytes) - 1, -1, -1):
            if self.peak_bytes[place] <= next_bytes or not place:
                yield place
                next_bytes = int(self.peak_bytes[place]) - stride


def find_curve(
    chain: Chain,
    *,
    latest_ns: Sequence[int] | None = None,
    most_bytes: int = np.iinfo(np.int64).max,
) -> Curve:
    """For every budget the fastest choice.

    Args:
        chain: the step.
        latest_ns: of each block the most that it and all behind it may take, with what
            is outside of the blocks; None: any time.
        most_bytes: larger budgets do not matter.

    Returns:
        The curve; an empty one if no choice is in time.
    """
    room, cost = np.zeros(1, np.int64), np.full(1, chain.rest_ns, np.int64)
    levels: list[_Level] = []
    is_exact = True
    for number in range(len(chain.blocks) - 1, -1, -1):
        menu = chain.blocks[number].options
        rooms, costs = [], []
        for option in menu:
            need = chain.need_bytes(number, option)
            rooms.append(np.maximum(need, room + option.kept_bytes))
            costs.append(cost + option.step_ns)
        endings = np.tile(np.arange(len(room), dtype=np.int32), len(menu))
        options = np.repeat(np.arange(len(menu), dtype=np.int8), len(room))
        room, cost = np.concatenate(rooms), np.concatenate(costs)
        if not number:
            room = np.maximum(room, chain.ends_bytes)
        best = _undominated(room, cost)
        in_time = room[best] <= most_bytes
        if latest_ns is not None:
            in_time &= cost[best] <= latest_ns[number]
        best = best[in_time]
        if len(best) > MOST_ENDINGS:
            is_exact = False
            best = best[_thinned(room[best])]
        room, cost = room[best], cost[best]
        levels.append(_Level(options[best], endings[best]))
    return Curve(room, cost, is_exact, tuple(reversed(levels)))


def _undominated(room: Numbers, cost: Numbers) -> NDArray[np.intp]:
    """Places of those than which no other needs as little room at as small a cost."""
    order = np.lexsort((cost, room))
    sorted_cost = cost[order]
    least_before = np.concatenate(
        (
            np.full(1, np.iinfo(np.int64).max, np.int64),
            np.minimum.accumulate(sorted_cost)[:-1],
        )
    )
    return order[sorted_cost < least_before[: len(order)]]


def _thinned(room: Numbers) -> NDArray[np.intp]:
    """Of ascending rooms the first and the last of each of many equal ranges."""
    width = max(1, -(-int(room[-1] - room[0] + 1) // (MOST_ENDINGS // 2)))
    cell = (room - room[0]) // width
    changes = np.flatnonzero(np.diff(cell))
    return np.unique(np.concatenate(([0], changes, changes + 1, [len(room) - 1])))
