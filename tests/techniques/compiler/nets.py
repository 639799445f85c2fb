"""Models whose gradients a compiled backward must average, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.models import TOY_NETS, Transformer, TransformerConfig
from overlaplab.techniques.compiler.backend import backend


class Gpt(nn.Module):
    """Two layers, head and embedding tied."""

    def __init__(self) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=2, d_model=16, num_heads=2, vocab_size=32, tied=True
        )
        self.inner = Transformer(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(7).long() % 32
        loss: Tensor = self.inner(tokens, tokens.roll(1, 1))
        return loss


class Convolutions(nn.Module):
    """Batch norm, which writes its buffers, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 3, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Dropping(nn.Module):
    """Two dropouts, whose masks are the seed's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Odd(nn.Module):
    """A bias added twice, a weight used through a view, a parameter not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        left = torch.tanh(x + self.bias)
        right = torch.tanh(2 * x + self.bias) @ self.weight.view(8, 8).t()
        return (left * right).mean()


class Broken(nn.Module):
    """A graph break between its layers; one weight is used on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        torch._dynamo.graph_break()
        return self.one(torch.tanh(self.two(x))).square().mean()


class Mixed(nn.Module):
    """float32, bfloat16 and float64."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 8)
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.high = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(x))
        x = torch.tanh(self.low(x.bfloat16()))
        return self.high(x.double()).square().mean()


def _vectors(rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def _images(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 4, 5, 5, generator=generator)


def _toy(rank: int) -> Tensor:
    return TOY_NETS["mlp"].make_batch(rank, 0)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (TOY_NETS["mlp"].make_model, _toy),
    "gpt": (Gpt, _vectors),
    "convolutions": (Convolutions, _images),
    "tied": (TOY_NETS["tied"].make_model, _toy),
    "dropout": (Dropping, _vectors),
    "branches": (Odd, _vectors),
    "frozen": (TOY_NETS["frozen"].make_model, _toy),
    "mixed dtypes": (Mixed, _vectors),
    "graph break": (Broken, _vectors),
}


def state_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients and buffers, by name."""
    found = {name: p.grad for name, p in model.named_parameters()}
    return found | {name: b.clone() for name, b in model.named_buffers()}


def step(name: str, rank: int, compiled: Callable[[nn.Module], Any]) -> nn.Module:
    """One forward and backward of a rank's batch."""
    make_model, make_batch = NETS[name]
    torch.manual_seed(0)
    model = make_model()
    torch.manual_seed(100 + rank)  # of the dropouts
    compiled(model)(make_batch(rank).to(ol.device())).backward()
    return model


def compiled_states(names: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Of each net, on the calling rank."""
    import torch.distributed as dist

    torch._dynamo.config.recompile_limit = 64
    made = backend(hardware="chalk", **settings)
    return {
        name: state_of(
            step(name, dist.get_rank(), lambda m: torch.compile(m, backend=made))
        )
        for name in names
    }


def expected_states(name: str, world_size: int) -> list[dict[str, Tensor | None]]:
    """Of each rank: every rank's batch in one process; gradients are their average."""
    models = [step(name, rank, lambda m: m) for rank in range(world_size)]
    gradients: dict[str, Tensor | None] = {}
    for parameters in zip(*(m.named_parameters() for m in models), strict=True):
        grads = [parameter.grad for _, parameter in parameters]
        total = grads[0]
        for grad in grads[1:]:
            total = None if total is None or grad is None else total + grad
        gradients[parameters[0][0]] = None if total is None else total / world_size
    return [state_of(model) | gradients for model in models]
