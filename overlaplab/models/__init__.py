"""The models that labs, demo and benchmarks share."""

from overlaplab.models.toy_nets import TOY_NETS, ToyNet, random_batch
from overlaplab.models.transformer import LLAMA_70B, Transformer, TransformerConfig

__all__ = [
    "LLAMA_70B",
    "TOY_NETS",
    "ToyNet",
    "Transformer",
    "TransformerConfig",
    "random_batch",
]
