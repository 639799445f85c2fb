"""Small nets, each with one thing that reducers get wrong.

`TOY_NETS` maps a name to a `ToyNet`: how to build it and how to draw a batch. Every
loss is a mean over samples and every batch has the same size, so that the mean over
ranks equals one process on the concatenated batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

BATCH = 6
WIDTH = 8


def random_batch(rank: int, step: int, *shape: int) -> Tensor:
    """Samples (BATCH, *shape) that differ by rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(BATCH, *shape, generator=generator)


def _vectors(rank: int, step: int) -> Tensor:
    return random_batch(rank, step, WIDTH)


@dataclass(frozen=True)
class ToyNet:
    """A net and its data."""

    name: str  # key in `TOY_NETS`
    trap: str  # what a reducer must get right on it
    # builds the net; its forward takes a batch and returns the loss
    make_model: Callable[[], nn.Module]
    # (rank, step) to float32 samples (BATCH, ...), deterministic
    make_batch: Callable[[int, int], Tensor] = _vectors


def _images(rank: int, step: int) -> Tensor:
    return random_batch(rank, step, 4, 5, 5)


def _signed(rank: int, step: int, sign: int) -> Tensor:
    """Feature 0 has one sign in a rank's whole batch: it names the rank's expert."""
    batch = _vectors(rank, step)
    return torch.cat((sign * batch[:, :1].abs(), batch[:, 1:]), dim=1)


def _routed(rank: int, step: int) -> Tensor:
    return _signed(rank, step, 1 if rank == 0 else -1)


def _alternating(rank: int, step: int) -> Tensor:
    """As `_routed`; the expert changes with the step too."""
    return _signed(rank, step, 1 if (rank + step) % 2 == 0 else -1)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


class Mlp(nn.Module):
    """The plain case."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return _mean_square(x)


class Tied(nn.Module):
    """Two modules share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        reconstructed: Tensor = self.decode(torch.tanh(self.encode(x)))
        return (reconstructed - x).square().mean()


class Frozen(nn.Module):
    """The first layer does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _mean_square(self.head(torch.tanh(self.body(x))))


class Unused(nn.Module):
    """`b` never reaches the loss, on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _mean_square(self.a(x))


class Routed(nn.Module):
    """Two experts; a sample goes to the one that the sign of its feature 0 names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        total = hidden.sum() * 0.0
        for expert, mine in zip(self.experts, (x[:, 0] >= 0, x[:, 0] < 0), strict=True):
            if bool(mine.any()):
                total = total + expert(hidden[mine]).square().sum()
        return total / (x.shape[0] * WIDTH)


class ZeroElement(nn.Module):
    """Empty parameters among the others, an empty Linear last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.nothing = nn.Parameter(torch.empty(0))
        self.layer = nn.Linear(WIDTH, 3, bias=False)
        self.empty = nn.Linear(WIDTH, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        loss: Tensor = self.layer(x).square().mean() + self.empty(x).sum()
        return loss


class OverSize(nn.Module):
    """One weight is larger than a small cap, with small ones around it."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Linear(WIDTH, 64 * WIDTH)
        self.last = nn.Linear(64 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return _mean_square(self.last(torch.tanh(self.large(self.small(x)))))


class MixedDtypes(nn.Module):
    """float32, float64 and bfloat16 layers in turn, or other dtypes."""

    def __init__(
        self,
        dtypes: Sequence[torch.dtype] = (
            torch.float32,
            torch.bfloat16,
            torch.float64,
            torch.float32,
        ),
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(next(layer.parameters()).dtype)))
        return _mean_square(x)


class ChannelsLast(nn.Module):
    """Convolutions whose weights are channels_last, a 1x1 one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(4, 8, 3)
        self.point = nn.Conv2d(8, 3, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return _mean_square(self.point(torch.relu(self.wide(x))))


class Buffered(nn.Module):
    """A buffer scales the output; two forwards share one backward."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, WIDTH))

    def scaled(self, x: Tensor) -> Tensor:
        return _mean_square(self.linear(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x) + self.scaled(0.5 * x)


class Branches(nn.Module):
    """Two equal branches; the data decide which runs first, never what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x[0, 0] >= 0):
            one, two = self.a(x).square().mean(), self.b(x).square().mean()
        else:
            two, one = self.b(x).square().mean(), self.a(x).square().mean()
        loss: Tensor = one + 2 * two
        return loss


TOY_NETS: Mapping[str, ToyNet] = MappingProxyType(
    {
        net.name: net
        for net in (
            ToyNet("mlp", "nothing: the plain case", Mlp),
            ToyNet("tied", "one reduction for a shared weight", Tied),
            ToyNet("frozen", "a parameter that does not train", Frozen),
            ToyNet("unused", "b.* keep None on every rank", Unused),
            ToyNet("uneven", "an expert used on rank 0 only", Routed, _routed),
            ToyNet("alternating", "used ranks change every step", Routed, _alternating),
            ToyNet("zero_element", "empty parameters are not waited for", ZeroElement),
            ToyNet("over_size", "a parameter above the cap is alone", OverSize),
            ToyNet("mixed_dtypes", "one dtype a bucket", MixedDtypes),
            ToyNet("channels_last", "strides are kept", ChannelsLast, _images),
            ToyNet("buffers", "buffers are not written in forward", Buffered),
            ToyNet("branches", "gradients arrive in other orders", Branches, _routed),
        )
    }
)
