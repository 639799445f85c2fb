"""A small GPT: the model that the demo trains and the benchmark measures.

Knows nothing of ranks, streams or reducers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a `Transformer`; the defaults are small enough for a laptop.

    Args:
        num_layers: blocks.
        d_model: width of the residual stream.
        num_heads: attention heads; divides `d_model`.
        vocab_size: tokens; embedding and head are two matrices of this many rows.
        max_tokens: longest sequence.
        tied: the head shares the embedding's weight.
        num_kv_heads: heads of keys and values, each shared by as many query heads;
            divides `num_heads`; None: `num_heads`.
        d_mlp: inner width of the MLP; None: 4 * `d_model`.
        gated: the MLP is down(silu(gate(x)) * up(x)) instead of down(gelu(up(x))).
    """

    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    vocab_size: int = 256
    max_tokens: int = 1024
    tied: bool = False
    num_kv_heads: int | None = None
    d_mlp: int | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        for field in (
            *("num_layers", "d_model", "num_heads", "vocab_size", "max_tokens"),
            *("num_kv_heads", "d_mlp"),
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(
                    f"TransformerConfig.{field} is {value}; expected 1 or more"
                )
        if self.d_model % self.num_heads:
            raise ValueError(
                f"TransformerConfig.d_model ({self.d_model}) must be a multiple of "
                f"num_heads ({self.num_heads})"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"TransformerConfig.num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )


# The matrices of Llama 3 70B (Grattafiori et al., 2024, table 3): 70.6 B parameters.
# Norms and positions are this file's.
LLAMA_70B = TransformerConfig(
    num_layers=80,
    d_model=8192,
    num_heads=64,
    num_kv_heads=8,
    d_mlp=28_672,
    gated=True,
    vocab_size=128_256,
    max_tokens=8192,
)


class Block(nn.Module):
    """Attention, then a wider MLP, each added to its input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        d_model = config.d_model
        d_mlp = config.d_mlp or 4 * d_model
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        num_heads = self.num_heads + 2 * self.num_kv_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, num_heads * (d_model // config.num_heads))
        self.projection = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.gate = nn.Linear(d_model, d_mlp) if config.gated else None
        self.widen = nn.Linear(d_model, d_mlp)
        self.narrow = nn.Linear(d_mlp, d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        normal = self.mlp_norm(x)
        if self.gate is None:
            hidden = F.gelu(self.widen(normal), approximate="tanh")
        else:
            hidden = F.silu(self.gate(normal)) * self.widen(normal)
        out: Tensor = x + self.narrow(hidden)
        return out

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        if self.num_kv_heads == self.num_heads:
            qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, -1)
            query, key, value = qkv.transpose(1, 3).unbind(dim=2)
        else:
            shared = self.num_heads // self.num_kv_heads
            qkv = self.qkv(x).view(batch, tokens, -1, x.shape[2] // self.num_heads)
            sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            query, key, value = qkv.transpose(1, 2).split(sizes, dim=1)
            key = key.repeat_interleave(shared, dim=1)
            value = value.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Transformer(nn.Module):
    """A decoder-only transformer with fixed sinusoidal positions.

    Args:
        config: its sizes.

    Positions are a buffer and not a parameter, so that every gradient has work of
    its own behind it.
    """

    positions: Tensor

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or TransformerConfig()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer(
            "positions",
            _sinusoids(config.max_tokens, config.d_model),
            persistent=False,
        )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the mean cross entropy where `targets` are given.

        Args:
            tokens: int64 (batch, tokens).
            targets: int64 (batch, tokens): the token that follows each.

        Returns:
            (batch, tokens, vocab_size) logits, or the loss, a scalar.
        """
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _sinusoids(num_tokens: int, d_model: int) -> Tensor:
    """Attention Is All You Need, section 3.5, scaled to the embedding's 0.02."""
    frequency = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10_000.0) / d_model))
    angle = torch.arange(num_tokens)[:, None] * frequency
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    return 0.02 * table[:, :d_model]
