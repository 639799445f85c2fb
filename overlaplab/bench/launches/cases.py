"""The modules and optimizers whose launches are counted, on any device.

Built on the calling rank's device, in the dtype of its `Sizes`; the same on CUDA, on a
CPU process and on the virtual cluster, where `parity` compares what is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.bench.checkpoint.models import DroppingBlock
from overlaplab.bench.workload import default_dtype
from overlaplab.models.transformer import Block, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of all cases; activations are (batch, tokens, width).

    Args:
        images: (batch, channels, height, width) of convolutions.
        matrices, matrix: how many square matrices the optimizers step, and their width.
    """

    batch: int = 8
    tokens: int = 1024
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    gated_width: int = 14336
    vocab: int = 32768
    images: tuple[int, int, int, int] = (64, 64, 56, 56)
    matrices: int = 100
    matrix: int = 1024
    dtype: str = "bfloat16"


GPU = Sizes()
SMALL = Sizes(
    batch=2,
    tokens=16,
    width=32,
    heads=4,
    kv_heads=2,
    gated_width=48,
    vocab=64,
    images=(2, 4, 6, 6),
    matrices=3,
    matrix=8,
    dtype="float32",
)


@dataclass(frozen=True)
class Case:
    """One module and its inputs.

    Args:
        call: the module.
        inputs: those of floating point require a gradient.
    """

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    @property
    def parameters(self) -> list[Tensor]:
        owner = self.call
        return list(owner.parameters()) if isinstance(owner, nn.Module) else []

    @property
    def leaves(self) -> list[Tensor]:
        """What gets a gradient."""
        return [*self.parameters, *(t for t in self.inputs if t.requires_grad)]


class Activated(nn.Module):
    """A linear layer whose ReLU works in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.linear(x))


class Dropped(DroppingBlock):
    """The GPT block with dropout where GPT-2 has it: attention, and each residual."""

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, -1)
        query, key, value = qkv.transpose(1, 3).unbind(dim=2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=0.1
        )
        out: Tensor = self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Llama(nn.Module):
    """A block of Llama 3: RMSNorm, rotary positions, shared keys, a gated MLP."""

    table: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, head = sizes.width, sizes.width // sizes.heads
        linear = partial(nn.Linear, bias=False)
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = linear(width, width)
        self.key = linear(width, head * sizes.kv_heads)
        self.value = linear(width, head * sizes.kv_heads)
        self.projection = linear(width, width)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = linear(width, sizes.gated_width)
        self.up = linear(width, sizes.gated_width)
        self.down = linear(sizes.gated_width, width)
        self.register_buffer("table", torch.randn(2, sizes.tokens, head))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        normal = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normal)) * self.up(normal))
        return out

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            part.view(batch, tokens, heads, -1).transpose(1, 2)
            for part, heads in (
                (self.query(x), self.heads),
                (self.key(x), self.kv_heads),
                (self.value(x), self.kv_heads),
            )
        )
        query, key = rotate(query, self.table), rotate(key, self.table)
        shared = self.heads // self.kv_heads
        key = key.repeat_interleave(shared, dim=1)
        value = value.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return out


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions as transformers has them; `table` holds cosines and sines."""
    first, second = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-second, first), dim=-1) * table[1]


class Residual(nn.Module):
    """The block of a residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.first, self.second = conv(channels, channels), conv(channels, channels)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu_(self.norms[0](self.first(x)))
        return F.relu_(self.norms[1](self.second(inner)) + x)


class Ends(nn.Module):
    """What is around a language model's blocks: embedding, norm, head and loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets)


def _rows(s: Sizes) -> Tensor:
    return torch.randn(s.batch, s.tokens, s.width, requires_grad=True)


def _heads(s: Sizes, heads: int) -> Tensor:
    head = s.width // s.heads
    return torch.randn(s.batch, heads, s.tokens, head, requires_grad=True)


def _images(s: Sizes) -> Tensor:
    return torch.randn(s.images, requires_grad=True)


def _tokens(s: Sizes, *shape: int) -> Tensor:
    return torch.randint(s.vocab, shape)


def _qkv(s: Sizes) -> tuple[Tensor, ...]:
    return tuple(_heads(s, s.heads) for _ in range(3))


def _config(s: Sizes) -> TransformerConfig:
    return TransformerConfig(d_model=s.width, num_heads=s.heads)


def _mlp(s: Sizes) -> nn.Module:
    widen, narrow = nn.Linear(s.width, 4 * s.width), nn.Linear(4 * s.width, s.width)
    return nn.Sequential(widen, nn.GELU(approximate="tanh"), narrow)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


_attention = partial(F.scaled_dot_product_attention, is_causal=True)
_Make = Callable[[Sizes], tuple[Callable[..., Any], tuple[Tensor, ...]]]

MODULES: dict[str, _Make] = {
    "linear": lambda s: (nn.Linear(s.width, s.width), (_rows(s),)),
    "linear without bias": lambda s: (
        nn.Linear(s.width, s.width, bias=False),
        (_rows(s),),
    ),
    "layer_norm": lambda s: (nn.LayerNorm(s.width), (_rows(s),)),
    "rms_norm": lambda s: (nn.RMSNorm(s.width), (_rows(s),)),
    "dropout": lambda s: (nn.Dropout(0.1), (_rows(s),)),
    "gelu": lambda s: (nn.GELU(approximate="tanh"), (_rows(s),)),
    "silu(x) * y": lambda s: (_silu_mul, (_rows(s), _rows(s))),
    "softmax": lambda s: (nn.Softmax(-1), (_rows(s),)),
    "attention": lambda s: (_attention, _qkv(s)),
    "attention with dropout": lambda s: (partial(_attention, dropout_p=0.1), _qkv(s)),
    "attention, keys shared": lambda s: (
        partial(_attention, enable_gqa=True),
        (_heads(s, s.heads), _heads(s, s.kv_heads), _heads(s, s.kv_heads)),
    ),
    "rotary positions": lambda s: (
        rotate,
        (_heads(s, s.heads), torch.randn(2, s.tokens, s.width // s.heads)),
    ),
    "embedding": lambda s: (
        nn.Embedding(s.vocab, s.width),
        (_tokens(s, s.batch, s.tokens),),
    ),
    "cross_entropy": lambda s: (
        F.cross_entropy,
        (
            torch.randn(s.batch * s.tokens, s.vocab, requires_grad=True),
            _tokens(s, s.batch * s.tokens),
        ),
    ),
    "mse_loss": lambda s: (F.mse_loss, (_rows(s), _rows(s).detach())),
    "conv2d": lambda s: (
        nn.Conv2d(s.images[1], 2 * s.images[1], 3, padding=1),
        (_images(s),),
    ),
    "batch_norm": lambda s: (nn.BatchNorm2d(s.images[1]), (_images(s),)),
    "max_pool2d": lambda s: (nn.MaxPool2d(2), (_images(s),)),
    "linear, relu in place": lambda s: (Activated(s.width), (_rows(s),)),
    "mlp": lambda s: (_mlp(s), (_rows(s),)),
    "residual block": lambda s: (Residual(s.images[1]), (_images(s),)),
    "ends of a model": lambda s: (
        Ends(s),
        (_tokens(s, s.batch, s.tokens), _tokens(s, s.batch * s.tokens)),
    ),
    "gpt block": lambda s: (Block(_config(s)), (_rows(s),)),
    "gpt block with dropout": lambda s: (Dropped(_config(s)), (_rows(s),)),
    "llama block": lambda s: (Llama(s), (_rows(s),)),
}


def build_module(name: str, sizes: Sizes) -> Case:
    """One of MODULES, on the calling rank's device."""
    with torch.device(streams.device()), default_dtype(sizes.dtype):
        torch.manual_seed(0)
        return Case(*MODULES[name](sizes))


Step = Callable[[], object]
Parameters = list[Tensor]


def _plain(kind: Any, **options: Any) -> Callable[[Parameters], Step]:
    return lambda parameters: kind(parameters, **options).step


def _clipped(parameters: Parameters) -> Step:
    step = torch.optim.Adam(parameters, lr=1e-3).step

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        step()

    return clip_and_step


_optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Parameters], Step]] = {
    "SGD": _plain(_optim.SGD, lr=0.1),
    "SGD with momentum": _plain(_optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": _plain(_optim.AdamW, lr=1e-3),
    "AdamW, fused": _plain(_optim.AdamW, lr=1e-3, fused=True),
    "AdamW, foreach=False": _plain(_optim.AdamW, lr=1e-3, foreach=False),
    "clip_grad_norm_ and Adam": _clipped,
}


def build_optimizer(name: str, sizes: Sizes) -> tuple[Step, Parameters]:
    """The step of one of OPTIMIZERS, its states made, and what it steps (float32)."""
    with torch.device(streams.device()), default_dtype("float32"):
        torch.manual_seed(0)
        shape = sizes.matrix, sizes.matrix
        parameters: Parameters = [
            nn.Parameter(torch.randn(shape)) for _ in range(sizes.matrices)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn(shape)
    step = OPTIMIZERS[name](parameters)
    step()
    return step, parameters
