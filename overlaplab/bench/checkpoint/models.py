"""The models whose activations are planned: a GPT, one with dropout, a conv net.

Each gives its loss, and has `finish`, which makes the loss of the last block's output:
so it can be compiled alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.bench.workload import MODELS
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.models.transformer import Block


class DroppingBlock(Block):
    """A block that drops parts of what it adds to its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.attention_norm(x)), 0.1, self.training)
        hidden = F.gelu(self.widen(self.mlp_norm(x)), approximate="tanh")
        out: Tensor = x + F.dropout(self.narrow(hidden), 0.1, self.training)
        return out


class Gpt(Transformer):
    """A `Transformer` whose end is a method.

    Args:
        config: its sizes.
        drops: with dropout behind attention and MLP.
    """

    def __init__(self, config: TransformerConfig, *, drops: bool = False) -> None:
        super().__init__(config)
        if drops:
            self.blocks = nn.ModuleList(
                DroppingBlock(config) for _ in range(config.num_layers)
            )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.finish(x, targets)

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """The loss of what the last block gives."""
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ConvBlock(nn.Module):
    """Two convolutions beside a shortcut, as in He et al., 2016.

    Args:
        channels: of its input.
        width: of its output; where that is larger it halves the image.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if width == channels else 2
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = (
            nn.Identity()
            if width == channels
            else nn.Conv2d(channels, width, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        out: Tensor = F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))
        return out


class ConvNet(nn.Module):
    """Residual blocks that get wider as images get smaller: no two stages are alike.

    Args:
        width: channels of the first stage; it doubles three times.
        depth: blocks of each stage.
        num_classes: of the images.
    """

    def __init__(self, width: int, depth: int, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        blocks = []
        channels = width
        for stage in range(4):
            for _ in range(depth):
                blocks.append(ConvBlock(channels, width << stage))
                channels = width << stage
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.finish(x, classes)

    def finish(self, x: Tensor, classes: Tensor) -> Tensor:
        """The loss of what the last block gives."""
        return F.cross_entropy(self.head(x.mean((2, 3))), classes)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the models and batches are."""

    gpt: str = "gpt-738m"  # of the benchmarks' models
    batch: int = 4
    tokens: int = 2048
    width: int = 64
    depth: int = 4
    images: int = 512  # fewer are bound by launches where the CPU is slow
    pixels: int = 224


Made = tuple[nn.Module, tuple[Tensor, ...]]


def _gpt(sizes: Sizes, drops: bool) -> Made:
    config = replace(MODELS[sizes.gpt], max_tokens=sizes.tokens)
    model = Gpt(config, drops=drops).to(_dtype())
    text = torch.randint(config.vocab_size, (sizes.batch, sizes.tokens + 1))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous())


def _conv(sizes: Sizes) -> Made:
    model = ConvNet(sizes.width, sizes.depth).to(_dtype())
    shape = sizes.images, 3, sizes.pixels, sizes.pixels
    images = torch.randn(shape, dtype=_dtype())
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = images.to(memory_format=torch.channels_last)
    return model, (images, torch.randint(1000, (sizes.images,)))


def _dtype() -> torch.dtype:
    return torch.bfloat16 if streams.device().type == "cuda" else torch.float32


CASES: dict[str, Callable[[Sizes], Made]] = {
    "gpt": lambda sizes: _gpt(sizes, False),
    "gpt-dropout": lambda sizes: _gpt(sizes, True),
    "conv": _conv,
}


def build_case(name: str, sizes: Sizes) -> Made:
    """A model and its batch on the device, the same at every call."""
    torch.manual_seed(0)
    with streams.device():
        return CASES[name](sizes)
