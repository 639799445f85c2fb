"""All-reduce after the backward pass: nothing is hidden. The baseline."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.techniques.data_parallel.buckets import BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.reducer import Reducer


class SerialReducer(Reducer):
    """Averages all gradients of a dtype at once, in `wait()`; it has no hooks.

    Args:
        model: on the rank's device; rank 0's values are broadcast.
        process_group: the ranks; the world if None.
    """

    def __init__(
        self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, process_group=process_group)

    def _make_plan(self, parameters: list[tuple[str, Tensor]]) -> BucketPlan:
        everything = sum(p.numel() * p.element_size() for _, p in parameters)
        return plan_buckets(parameters, cap_bytes=max(everything, 1))
