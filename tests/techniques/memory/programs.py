"""Models that planners get wrong, each with a way to train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlaplab.models import Transformer, TransformerConfig

Made = tuple[nn.Module, tuple[Tensor, ...]]
WIDTH = 16


class DroppingBlock(nn.Module):
    """A mask, and a temporary that is larger than what is kept."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.widen(x)), 0.25, self.training)
        return x + self.narrow(hidden)


class MlpBlock(DroppingBlock):
    """The same without a mask."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(x)))


class FusedBlock(nn.Module):
    """What CUDA has one kernel for and a CPU several: a norm, two kinds of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(self.norm(x)).unflatten(-1, (6, 8)).transpose(-2, -3)
        q, k, v = heads.unsqueeze(0).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        mixed = mixed.squeeze(0).transpose(0, 1).flatten(1)
        return x + F.dropout(mixed, 0.1)


class TanhBlock(nn.Module):
    """Keeps its output, and not its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class NormBlock(nn.Module):
    """Counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    """Blocks in a row, then a loss; the first input needs no gradient."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Skips(nn.Module):
    """A small U-net: what goes down is added when it comes up."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(MlpBlock(32) for _ in range(depth))
        self.up = nn.ModuleList(MlpBlock(48) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x * 2)
        for block in self.up:
            x = block(x) + skips.pop()
        return x.square().mean()


def _vectors(seed: int = 0) -> tuple[Tensor, ...]:
    return (torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def transformer() -> Made:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(num_layers=3, vocab_size=64, max_tokens=16))
    text = torch.randint(64, (2, 17))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous())


def tied() -> Made:
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=2, vocab_size=64, max_tokens=16, tied=True)
    text = torch.randint(64, (2, 17))
    return Transformer(config), (text[:, :-1].contiguous(), text[:, 1:].contiguous())


def dropping() -> Made:
    torch.manual_seed(0)
    return Net(*(DroppingBlock(32 * n) for n in (1, 4, 2, 3))), _vectors()


def mixed() -> Made:
    torch.manual_seed(0)
    blocks = DroppingBlock(), TanhBlock(), DroppingBlock(96), TanhBlock(), NormBlock()
    return Net(*blocks), _vectors()


def skips() -> Made:
    torch.manual_seed(0)
    return Skips(), _vectors()


def frozen_start() -> Made:
    torch.manual_seed(0)
    model = Net(*(MlpBlock(64) for _ in range(4)))
    model.blocks[0].requires_grad_(False)
    return model, _vectors()


def fused_on_cuda() -> Made:
    torch.manual_seed(0)
    return Net(*(FusedBlock() for _ in range(3))), _vectors()


MODELS: dict[str, Callable[[], Made]] = {
    "transformer": transformer,
    "tied": tied,
    "dropping": dropping,
    "mixed": mixed,
    "skips": skips,
    "frozen start": frozen_start,
    "fused on cuda": fused_on_cuda,
}


def two_steps(name: str, plan: Any) -> None:
    """Two steps with gradients that begin at none, for a cluster to watch."""
    model, inputs = MODELS[name]()
    plan.apply(model)
    for _ in range(2):
        model.zero_grad()
        model(*inputs).backward()


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Of one step from a fixed random state; then the buffers, and a random number."""
    torch.manual_seed(3)
    model.zero_grad()
    model(*inputs).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *(b.clone() for b in model.buffers()), torch.rand(1)]
