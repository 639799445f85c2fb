"""Random models, planned and then watched on the virtual cluster: never over budget.

    python -m tests.techniques.memory.sweep 1000

tries so many, some minutes' work, and prints each that needs more than its plan says;
`test_sweep.py` tries a few.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.techniques.memory import CheckpointPlan, measure_costs
from tests.techniques.memory.programs import (
    WIDTH,
    DroppingBlock,
    FusedBlock,
    MlpBlock,
    NormBlock,
    TanhBlock,
)


class InPlaceBlock(nn.Module):
    """Writes what it made itself."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x), inplace=True)).add_(x)


class SlicingBlock(nn.Module):
    """Its output is a part of what it made."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH + hidden)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))[:, :WIDTH]


class PlainBlock(nn.Module):
    """No parameters; keeps several things of the size of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) + torch.cos(x)


class RandomNet(nn.Module):
    """Blocks in a row, some results of which are used again later, then a loss.

    Args:
        seed: of all that is random in it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.blocks = nn.ModuleList(_block(draw) for _ in range(draw.randint(1, 7)))
        if draw.random() < 0.2:  # a block that is called twice
            self.blocks.append(self.blocks[0])
        if draw.random() < 0.2:
            self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, draw.choice((2, 64, 512)))
        self.scale = draw.random() < 0.3
        self.skips = {
            number: draw.randrange(number)
            for number in range(1, len(self.blocks))
            if draw.random() < 0.25
        }

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for number, block in enumerate(self.blocks):
            if number in self.skips:
                x = x + made[self.skips[number]] * 2
            x = block(x)
            made.append(x * 1.5 if self.scale else x)
        return self.head(x).square().mean()


def _block(draw: random.Random) -> nn.Module:
    hidden = 8 * draw.randint(1, 12)
    kind = draw.choice(
        (
            DroppingBlock,
            MlpBlock,
            InPlaceBlock,
            SlicingBlock,
            TanhBlock,
            NormBlock,
            FusedBlock,
            PlainBlock,
        )
    )
    has_size = kind in (DroppingBlock, MlpBlock, InPlaceBlock, SlicingBlock)
    return kind(hidden) if has_size else kind()


def make(seed: int) -> tuple[RandomNet, Tensor]:
    """A model and its input."""
    torch.manual_seed(seed)
    draw = random.Random(-seed - 1)
    x = torch.randn(draw.choice((8, 24, 50)), WIDTH)
    return RandomNet(seed), x.requires_grad_(draw.random() < 0.3)


def _two_steps(seed: int, plan: CheckpointPlan) -> None:
    model, x = make(seed)
    plan.apply(model)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        model(x).backward()


@dataclass(frozen=True)
class Found:
    """One plan of one model.

    Args:
        seed: of the model.
        names: the policies.
        budget_bytes: what the plan was made for.
        planned_bytes: the peak that it says.
        found_bytes: the peak on the virtual cluster.
    """

    seed: int
    names: tuple[str, ...]
    budget_bytes: int
    planned_bytes: int
    found_bytes: int

    @property
    def is_over(self) -> bool:
        return max(self.found_bytes, self.planned_bytes) > self.budget_bytes


def sweep(seeds: range) -> Iterator[Found | str]:
    """Of each model a plan under a random budget; why not, where there is none."""
    for seed in seeds:
        model, x = make(seed)
        try:
            costs = measure_costs(model, (x,), hardware="chalk")
        except ValueError as error:
            yield f"model {seed}: {error}"
            continue
        curve = costs.frontier()
        least, most = curve[-1].peak_bytes, curve[0].peak_bytes
        budget = random.Random(seed).randint(least, most)
        plan = costs.fastest(budget)
        run: Any = ol.run(
            _two_steps, seed, plan, world_size=1, hardware="chalk", check=False
        )
        (memory,) = run.timeline.memory
        found = max(num_bytes for _, num_bytes in memory.steps)
        yield Found(seed, plan.names, budget, plan.peak_bytes, found)


def main(num_models: int, first: int = 0) -> int:
    """Print those over their budgets, and how close plans are; the exit code."""
    over, refused, ratios = 0, 0, []
    for number, found in enumerate(sweep(range(first, first + num_models)), 1):
        if isinstance(found, str):
            refused += 1
            print(found, flush=True)
            continue
        ratios.append(found.planned_bytes / found.found_bytes)
        if found.is_over:
            over += 1
            print(f"OVER: {found}", flush=True)
        if not number % 100:
            print(f"{number} models, {over} over", flush=True)
    ratios.sort()
    middle, worst = ratios[len(ratios) // 2], ratios[-1]
    print(
        f"{num_models} models: {over} over their budgets, {refused} refused; "
        f"planned to found: median {middle:.4f}, worst {worst:.4f}"
    )
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
