"""Models, groups and settings for which no reducer is built."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from overlaplab.techniques.data_parallel import BFloat16Wire, BucketedReducer
from tests.techniques.data_parallel.misuse import Buffers, weight
from tests.techniques.data_parallel.training import REDUCERS


def two_reducers(first: str, second: str) -> None:
    model = weight()
    kept = REDUCERS[first](model)
    REDUCERS[second](model)
    del kept


def wrapped_in_ddp() -> None:
    BucketedReducer(nn.parallel.DistributedDataParallel(weight()))


def strange_buffer(kind: str) -> None:
    buffers = {
        "expanded": torch.ones(1).expand(4),
        "int16": torch.ones(2, dtype=torch.int16),
        "sparse": torch.eye(2).to_sparse(),
    }
    BucketedReducer(Buffers(buffers[kind]))


def meta_model() -> None:
    BucketedReducer(nn.Linear(2, 2, device="meta"))


def not_in_the_group() -> None:
    BucketedReducer(weight(), process_group=dist.new_group([0]))


def two_ways_of_a_wire() -> None:
    wire = BFloat16Wire(dist.group.WORLD)
    BucketedReducer(weight(), wire=wire, reduce_dtype=torch.float32)
