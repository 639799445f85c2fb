"""The models that labs, demo and benchmarks share."""

from overlaplab.models.toy_nets import TOY_NETS as TOY_NETS
from overlaplab.models.toy_nets import ToyNet as ToyNet
from overlaplab.models.toy_nets import random_batch as random_batch
from overlaplab.models.transformer import LLAMA_70B as LLAMA_70B
from overlaplab.models.transformer import Transformer as Transformer
from overlaplab.models.transformer import TransformerConfig as TransformerConfig
