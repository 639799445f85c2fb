"""What generated code calls: an average over the ranks, launched and waited for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from overlaplab.techniques.data_parallel.wire import AllReduce


class Averaging:
    """An average in flight. Until `wait` nobody may read or write its tensors.

    Args:
        tensors: averaged in place, of one dtype; held until `wait`.
        group: the ranks.
    """

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        self._wire = AllReduce(group)
        self._launched: Any = self._wire.launch(tensors)

    def wait(self) -> None:
        """Make the current stream wait for the averages; the CPU goes on."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._wire.finish(launched)


def average(tensors: list[Tensor], group: dist.ProcessGroup) -> Averaging:
    """Launch one all-reduce of `tensors`, behind the work of the current stream."""
    return Averaging(tensors, group)
