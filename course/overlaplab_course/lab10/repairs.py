"""Exercise 10.6: which broken prefetcher a learner's number draws, and on what."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from overlaplab.program.times import Times
from overlaplab_course.lab10 import broken
from overlaplab_course.lab10.given import Played, Stack, Weights, numel_of
from overlaplab_course.lab10.ring import find_gathers, find_uses
from overlaplab_course.lab10.show import play

DEPTH = 1
KINDS = {"wide": "too many bytes", "hasty": "race"}


@dataclass(frozen=True)
class RepairCase:
    """What belongs to one learner's number.

    Args:
        name: of the prefetcher that is theirs, "wide" or "hasty".
        stack: it runs on; one layer has a table.
        num_ranks: so many.
    """

    name: str
    stack: Stack
    num_ranks: int

    @property
    def kind(self) -> str:
        """What is wrong with the one that was drawn."""
        return KINDS[self.name]

    @property
    def layer(self) -> int:
        """The layer that the diagnosis asks for: from the run of what was given."""
        seen = self.play(getattr(broken, self.name))
        gathers = find_gathers(seen.program, 0)
        if self.name == "wide":
            largest = max(gathers, key=lambda g: sum(a.run_bytes for a in g.op.writes))
            return int(largest.layer or 0)
        times = Times(seen.program, seen.run.timeline)
        ends = {g.layer: times.end(0, g.op.index) for g in gathers}
        uses = find_uses(seen.program, 0)
        return max(u.layer for u in uses if times.start(0, u.ops[0]) < ends[u.layer])

    def play(self, weights: Weights) -> Played:
        """The forward of the stack on the board, depth 1."""
        return play(weights, DEPTH, stack=self.stack, num_ranks=self.num_ranks)

    def gathers_text(self, seen: Played) -> str:
        """What each gather of rank 0 brings, beside what the layer has."""
        lines = []
        for gather in find_gathers(seen.program, 0):
            size = sum(access.run_bytes for access in gather.op.writes)
            own = 0 if gather.layer is None else self._layer_bytes(gather.layer)
            lines.append(
                f"gather of layer {gather.layer}: {size} bytes; the layer has {own}"
            )
        return "\n".join(lines)

    def _layer_bytes(self, layer: int) -> int:
        return numel_of(self.stack.shapes(layer)) * self.stack.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"yours is {self.name!r}: {self.stack.num_layers} layers on "
            f"{self.num_ranks} ranks, depth {DEPTH}"
        )


@lru_cache(maxsize=16)
def repair_case(number: int) -> RepairCase:
    """The broken prefetcher of a learner's number, and its stack."""
    draw = random.Random(int(number))
    name = draw.choice(tuple(KINDS))
    num_layers = draw.choice((6, 7))
    tables = [0] * num_layers
    tables[draw.choice((2, 3, 4))] = 400
    return RepairCase(
        name, Stack(num_layers, tables=tuple(tables)), draw.choice((2, 3))
    )
