"""The two ends between which buckets lie: a message per parameter, one for all."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from overlaplab.techniques.buckets import MIB
from overlaplab.techniques.data_parallel.reducer import BucketedReducer

EVERYTHING_MIB = 2.0**20  # more than the gradients of any model on one device


class HookReducer(BucketedReducer):
    """One all-reduce per parameter, launched as its gradient arrives.

    The simplest overlap: each gradient leaves as early as it can, at the price of one
    launch and one latency for every parameter. Everything else is as in
    `BucketedReducer`.

    Args:
        model: on the rank's device; rank 0's values are broadcast.
        process_group: the ranks; the world if None.
    """

    def __init__(
        self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, bucket_mib=1 / MIB, process_group=process_group)


class SerialReducer(BucketedReducer):
    """Averages all gradients of a dtype at once, in `wait()`: nothing is hidden.

    The baseline. Its hooks only watch over the step, as if all backwards ran in
    `no_sync()`; everything else is as in `BucketedReducer`.

    Args:
        model: on the rank's device; rank 0's values are broadcast.
        process_group: the ranks; the world if None.
    """

    def __init__(
        self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, bucket_mib=EVERYTHING_MIB, process_group=process_group)
        self._steps.arrivals.paused = True

    def wait(self) -> None:
        self._steps.arrivals.paused = False
        try:
            super().wait()
        finally:
            self._steps.arrivals.paused = True
