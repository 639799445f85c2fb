"""How long a forward takes with a ring of slots, counted: for exercise 10.4.

One wire, one compute stream, no launch costs: gathers follow one another, and the one
into a slot waits until the layer that was in it has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from overlaplab.grading.laws import regret


def step_ms(
    gather_ms: Sequence[float], compute_ms: Sequence[float], depth: int
) -> float:
    """From the first gather to the end of the last layer."""
    wire, computed = 0.0, 0.0
    ends: list[float] = []
    for i, (gather, compute) in enumerate(zip(gather_ms, compute_ms, strict=True)):
        free = ends[i - depth - 1] if i > depth else 0.0
        wire = max(wire, free) + gather
        computed = max(computed, wire) + compute
        ends.append(computed)
    return computed


@dataclass(frozen=True)
class DepthCase:
    """One model on one link; none of them is in the lesson.

    Args:
        name: what it is like.
        gather_ms, compute_ms: of each layer, in the order of use.
        layer_mib: of one slot.
        memory_mib: what there is for the ring.
    """

    name: str
    gather_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]
    layer_mib: float
    memory_mib: float

    @staticmethod
    def of(table: dict[str, Any]) -> DepthCase:
        """From a table of exercises.toml: layers are runs of (how many, ms, ms)."""
        layers = [(g, c) for n, g, c in table["layers"] for _ in range(n)]
        layers *= table.get("times", 1)
        gathers, computes = zip(*layers, strict=True)
        memory = table["slots"] * table["layer_mib"] + table["layer_mib"] / 2
        return DepthCase(table["name"], gathers, computes, table["layer_mib"], memory)

    @property
    def most(self) -> int:
        """The largest depth that the memory allows."""
        return int(self.memory_mib / self.layer_mib) - 1

    def step_ms(self, depth: int) -> float:
        """As above."""
        return step_ms(self.gather_ms, self.compute_ms, depth)

    @cached_property
    def best_ms(self) -> float:
        """The shortest step that fits."""
        return min(self.step_ms(depth) for depth in range(self.most + 1))

    @cached_property
    def least(self) -> int:
        """The least depth that reaches it."""
        depths = range(self.most + 1)
        return next(d for d in depths if self.step_ms(d) <= 1.0001 * self.best_ms)

    def regret(self, depth: int) -> float:
        """What a depth that fits loses of what there was to gain over depth 0."""
        steps = (self.step_ms(depth), self.best_ms, self.step_ms(0))
        return regret(*(round(1e6 * step) for step in steps))

    def saves_nothing(self, depth: int) -> bool:
        """Whether the depth is larger than one that is as good, to half a percent."""
        return depth > 0 and self.step_ms(depth - 1) <= 1.005 * self.step_ms(depth)
