"""What section 6 of lab 08 runs: training with two sets of weights that take turns.

A learner's number draws how many batches there are, hence which gradients a set lacks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import origins
from overlaplab.grading.forms import Examined
from overlaplab.program import Op
from overlaplab.program.times import Times
from overlaplab.timeline import Span, Timeline
from overlaplab_course.lab03.jobs import SET_UP, SLOW, WIDTH, by_label

RATE = 0.1
ROWS = 3 * WIDTH  # a message takes 4 ms over three ranks
_GRADIENT, _COLUMNS = "gradient ", 192  # of a matmul that takes 9 ms

Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# (front, back, batches, gradient) -> the weights at the end
TrainTwo = Callable[
    [torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Gradient], torch.Tensor
]


@dataclass(frozen=True)
class TwoSets:
    """The training of one learner's number.

    Args:
        num_batches: so many; the gradient of the last is never used.
        num_ranks: so many.
        rows: of the weights and of a batch.
    """

    num_batches: int
    num_ranks: int = 3
    rows: int = ROWS

    @property
    def num_gradients(self) -> int:
        """How many gradients are in the weights that the broken program returns."""
        return self.num_batches // 2

    @property
    def first_missing(self) -> int:
        """The first batch whose gradient they lack."""
        return 1 - self.num_batches % 2

    def play(self, program: TrainTwo) -> Played:
        """Run `program` on this learner's batches."""
        options = {"world_size": self.num_ranks, "hardware": SLOW, "timeout_s": 30}
        return Played.of(_on_rank, self, program, **options)

    def __str__(self) -> str:
        ranks = "" if self.num_ranks == 3 else f", {self.num_ranks} ranks"
        return f"{self.num_batches} batches, 0 to {self.num_batches - 1}{ranks}"


@lru_cache(maxsize=16)
def two_sets(number: int) -> TwoSets:
    """What belongs to a learner's number."""
    return TwoSets(random.Random(31 * int(number) + 4).choice((6, 7, 8, 9)))


class Played(Examined):
    """A run; `values`: by rank, the weights at the end."""

    @property
    def timeline(self) -> Timeline:
        """Rank 0's, with a lane for each set: who reads it, who writes it."""
        named = by_label(self.run.timeline).of_rank(0)
        times = Times(self.program, named)
        lanes = [
            Span(0, f"set {letter}", "compute", label, start, end)
            for letter in "AB"
            for label, start, end in self._touched(letter, times)
        ]
        causes = (*named.causes, *[None] * len(lanes)) if named.causes else ()
        return replace(named, spans=(*named.spans, *lanes), causes=causes)

    def _touched(self, letter: str, times: Times) -> list[tuple[str, int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for op in self.program.ranks[0]:
            label = _named(op)  # each update has one of its own
            if label and self._storage(letter) in _storages(op):
                start, end = times.start(0, op.index), times.end(0, op.index)
                first, last = found.get(label, (start, end))
                found[label] = min(first, start), max(last, end)
        return [(label, *times) for label, times in found.items()]

    def _storage(self, letter: str) -> int:
        return next(
            name.access.storage
            for name in self.program.names
            if name.rank == 0 and name.name == f"set {letter}"
        )

    def story(self) -> str:
        """A line for each batch: the set that its gradient read, and what that made."""
        held = {self._storage(letter): letter for letter in "AB"}
        lines: dict[str, str] = {}
        gradients: dict[int, str] = {}
        for op in self.program.ranks[0]:
            label = _named(op)
            if label.startswith(_GRADIENT):
                reads = {held[a.storage] for a in op.reads if a.storage in held}
                if reads:
                    lines[label] = f"{label} from set {', '.join(reads)}"
                gradients |= {access.storage: label for access in op.writes}
                continue
            into = [held[a.storage] for a in op.writes if a.storage in held]
            base = [held[a.storage] for a in op.reads if a.storage in held]
            used = [gradients[a.storage] for a in op.reads if a.storage in gradients]
            if into and base and used and op.collective is None:
                lines[used[0]] += f"; set {into[0]} = set {base[0]} - rate * {used[0]}"
        return "\n".join(lines.values())


def _named(op: Op) -> str:
    if op.kind != "compute" or op.label == SET_UP:
        return ""
    return op.label or f"update {op.index}"


def _storages(op: Op) -> set[int]:
    return {access.storage for access in (*op.reads, *op.writes)}


def _on_rank(case: TwoSets, program: TrainTwo) -> origins.Held:
    with streams.annotate(SET_UP):
        draw = torch.Generator().manual_seed(5)
        start = torch.randn(case.rows, WIDTH, generator=draw)
        sets = [start.clone(), start.clone()]
        for letter, weights in zip("AB", sets, strict=True):
            streams.name_tensor(weights, f"set {letter}")
        draw = torch.Generator().manual_seed(60 + dist.get_rank())
        batches = [
            torch.randn(case.rows, WIDTH, generator=draw)
            for _ in range(case.num_batches)
        ]
        streams.synchronize()
    count = 0

    def gradient(weights: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        nonlocal count
        factor = torch.full((1, 1), 0.01)
        with streams.annotate(f"{_GRADIENT}{count}"):
            a, b = factor.expand(case.rows, _COLUMNS), factor.expand(_COLUMNS, WIDTH)
            # From the weights and the batch, and at the end once more from the weights.
            made = torch.addmm(torch.tanh(weights) - batch, a, b)
            made += 0.5 * weights
        count += 1
        return made

    return origins.hold(program, *sets, batches, gradient)
