"""One all-reduce a parameter, launched as its gradient arrives.

The simplest overlap: it hides as early as can be, and pays the latency and the launch
of one collective for every parameter.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.techniques.data_parallel.bucketed import BucketedReducer
from overlaplab.techniques.data_parallel.buckets import BucketPlan, plan_buckets


class HookReducer(BucketedReducer):
    """A `BucketedReducer` whose every bucket holds one parameter.

    Args:
        model: on the rank's device; rank 0's values are broadcast.
        process_group: the ranks; the world if None.
    """

    def __init__(
        self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, process_group=process_group)

    def _make_plan(self, parameters: list[tuple[str, Tensor]]) -> BucketPlan:
        return plan_buckets(parameters, cap_bytes=1)
