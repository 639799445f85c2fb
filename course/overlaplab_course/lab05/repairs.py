"""Exercises 5.6a and 5.6b: which two of five broken reducers a number draws."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.grading import fixtures
from overlaplab.grading.fixtures import Fixture
from overlaplab_course.lab05 import broken
from overlaplab_course.lab05.given import MakeReducer, Played, play

WIDTH = 64  # of the samples
KINDS = {
    "Alder": "behind the backward pass",
    "Birch": "before it was accumulated",
    "Cedar": "front layers first",
    "Elm": "other gradients on other ranks",
    "Fir": "a sum",
}


class TwoWays(nn.Module):
    """Two equal branches, and a trunk.

    Args:
        widths: of the trunk.
        differ: ranks but the first run the branches in the other order. What is
            computed is the same.
    """

    def __init__(self, widths: tuple[int, ...], differ: bool) -> None:
        super().__init__()
        self.differ = differ
        pairs = [(WIDTH, widths[0]), (WIDTH, widths[0]), *pairwise(widths)]
        made = (nn.Parameter(torch.randn(a, b) / a**0.5) for a, b in pairs)
        self.left, self.right, *trunk = made
        self.trunk = nn.ParameterList(trunk)

    def forward(self, x: Tensor) -> Tensor:
        if self.differ and dist.is_initialized() and dist.get_rank() > 0:
            right, left = x @ self.right, x @ self.left
        else:
            left, right = x @ self.left, x @ self.right
        x = torch.tanh(left) + torch.tanh(right)
        for weight in self.trunk:
            x = torch.tanh(x @ weight)
        return x.square().mean()


@dataclass(frozen=True)
class RepairCase:
    """One broken reducer and the net that it is tried on.

    Args:
        name: of the class in the notebook.
        widths: of the trunk.
        ranks: so many.
    """

    name: str
    widths: tuple[int, ...]
    ranks: int

    @property
    def kind(self) -> str:
        """What is wrong with it."""
        return KINDS[self.name]

    @property
    def elsewhere(self) -> RepairCase:
        """The same on a longer trunk and on another number of ranks."""
        return replace(self, widths=(*self.widths, 56), ranks=7 - self.ranks)

    @property
    def fixture(self) -> Fixture:
        """The net, its data, and how it is trained."""
        base = fixtures.layers_fixture("yours", (WIDTH, *self.widths))
        make = partial(TwoWays, self.widths, self.name == "Elm")
        return replace(base, make_model=make, same_seed=True)

    def play(self, make_reducer: MakeReducer) -> Played:
        """Three steps with a reducer."""
        trunk = [f"trunk.{i}" for i in range(len(self.widths) - 1)]
        forward = [f"F {name}" for name in ("left", "right", *trunk)]
        backward = [f"B {name}" for name in reversed(trunk) for _ in range(2)]
        products = (*forward, *backward, "B right", "B left")
        return play(make_reducer, self.fixture, self.ranks, products)

    def truth(self) -> dict[str, object]:
        """The right diagnosis, read off the run of what was handed out."""
        return {"kind": self.kind, **_shown(self)}

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.widths))
        return f"{self.name}, on a trunk of {sizes} and {self.ranks} ranks"


@lru_cache(maxsize=32)
def _shown(case: RepairCase) -> dict[str, object]:
    """What the diagnosis asks for beside the kind."""
    if case.name == "Fir":
        return {"factor": case.ranks}
    seen = case.play(getattr(broken, case.name))
    if case.name == "Birch":
        return {"read_by": _reader(seen)}
    if case.name == "Elm":
        sends = [seen.evidence.sends_of(rank, 1) for rank in (0, 1)]
        carried = [[{n for n, _ in s.covers} for s in of_rank] for of_rank in sends]
        pairs = enumerate(zip(*carried, strict=False))
        return {"message": next(i for i, (here, there) in pairs if here != there)}
    return {"exposed_ms": seen.timeline.report().exposed_ns / 1e6}


def _reader(seen: Played) -> str:
    """The operator that the first finding says is not ordered behind the message."""
    hazard = next(f for f in seen.findings if f.kind == "hazard")
    ops = seen.evidence.program.ranks[hazard.rank]
    return next(ops[i].name for i in hazard.ops if ops[i].collective is None)


@lru_cache(maxsize=16)
def repair_cases(number: int) -> tuple[RepairCase, RepairCase]:
    """The two of a learner's number: never the same, on nets of their own."""
    draw = random.Random(int(number))
    made = [
        RepairCase(
            name,
            tuple(draw.choice((48, 64, 80)) for _ in range(draw.choice((4, 5)))),
            draw.choice((3, 4)),
        )
        for name in draw.sample(sorted(KINDS), 2)
    ]
    return made[0], made[1]
