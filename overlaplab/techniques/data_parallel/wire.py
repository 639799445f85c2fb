"""How a bucket's tensors become their averages, between launch and finish.

`payload.Wire` says what a wire must do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.techniques.data_parallel.options import check_reduce_dtype
from overlaplab.techniques.groups import checked_group
from overlaplab.torch_versions import averages


class AllReduce:
    """One coalesced all-reduce on the tensors themselves: no flat buffer, no copy.

    Args:
        group: the ranks.
        reduce_dtype: dtype on the wire; None keeps the gradients' own. Complex
            gradients always keep theirs.

    Raises:
        TypeError, ValueError: `group` is none; `reduce_dtype` is no dtype, or not of
            floats.
    """

    def __init__(
        self, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None = None
    ) -> None:
        if reduce_dtype is not None:
            check_reduce_dtype(reduce_dtype)
        self._group = checked_group(group)
        self._reduce_dtype = reduce_dtype
        self._size = dist.get_world_size(group)
        self._divides = not averages(group)  # no AVG: a sum, divided here
        self._options = dist.AllreduceCoalescedOptions()
        average, total = dist.ReduceOp.AVG, dist.ReduceOp.SUM
        self._options.reduceOp = dist.ReduceOp(total if self._divides else average)
        self._options.asyncOp = True

    def dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        if self._reduce_dtype is None or gradient.is_complex:
            return gradient
        return self._reduce_dtype

    def launch(self, tensors: list[Tensor]) -> Any:
        numbers = tensors
        if tensors[0].is_complex():
            numbers = [torch.view_as_real(t) for t in tensors]
        if self._divides:  # gloo
            # float16 is divided here, before its sum can overflow; others in `finish`.
            if tensors[0].dtype is torch.float16:
                torch._foreach_div_(tensors, self._size)
            # gloo counts up the version of what it writes. These aliases have versions
            # of their own, so that a gradient's tells whether somebody else wrote it.
            numbers = [t.data for t in numbers]
        # Behind the current stream's work, which is all that NCCL waits for.
        return self._group.allreduce_coalesced(numbers, self._options), tensors

    def finish(self, launched: Any) -> None:
        work, tensors = launched
        work.wait()
        if self._divides and tensors[0].dtype is not torch.float16:
            torch._foreach_div_(tensors, self._size)
