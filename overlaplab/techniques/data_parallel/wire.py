"""How the average is made: what happens to a bucket between launch and finish.

`AllReduce` is the usual wire. `BFloat16Wire` is an example of another one, as DDP's
communication hooks are: half the bytes on the link, and yet no sum in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.techniques.in_flight import Wire
from overlaplab.techniques.model_facts import as_real
from overlaplab.torch_versions import all_gather_single, averages


class AllReduce:
    """One coalesced all-reduce on the tensors themselves: no flat buffer, no copy.

    Args:
        group: the ranks.
        reduce_dtype: dtype on the wire; None keeps the gradients' own. Complex
            gradients always keep theirs.

    Raises:
        TypeError, ValueError: `reduce_dtype` is no dtype, or not of floats.
    """

    def __init__(
        self, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None = None
    ) -> None:
        if reduce_dtype is not None:
            _check_dtype(reduce_dtype)
        self._group = group
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
        if self._divides:
            if tensors[0].dtype is torch.float16:  # the sum could overflow
                torch._foreach_div_(tensors, self._size)
            # gloo counts up the version of what it writes. These aliases have versions
            # of their own, so that a gradient's tells whether somebody else wrote it.
            numbers = [t.data for t in numbers]
        return self._group.allreduce_coalesced(numbers, self._options), tensors

    def finish(self, launched: Any) -> None:
        work, tensors = launched
        work.wait()
        if self._divides and tensors[0].dtype is not torch.float16:
            torch._foreach_div_(tensors, self._size)


def _check_dtype(reduce_dtype: object) -> None:
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(
            f"reduce_dtype is {reduce_dtype!r}; expected a dtype, such as torch.float32"
        )
    if not reduce_dtype.is_floating_point:
        raise ValueError(f"reduce_dtype is {reduce_dtype}; expected a float dtype")
    if reduce_dtype.itemsize == 1:
        raise ValueError(
            f"reduce_dtype is {reduce_dtype}, which process groups do not sum; "
            "expected a float dtype of 16 bits or more"
        )


def wire_of(
    group: dist.ProcessGroup, wire: Wire | None, reduce_dtype: torch.dtype | None
) -> Wire:
    """The caller's wire, or an all-reduce in `reduce_dtype`.

    Raises:
        TypeError: `wire` is no wire.
        ValueError: both are given.
    """
    if wire is None:
        return AllReduce(group, reduce_dtype)
    methods = ("dtype_of", "launch", "finish")
    if isinstance(wire, type) or not all(
        callable(getattr(wire, m, 0)) for m in methods
    ):
        raise TypeError(
            f"wire is {wire!r}; expected an object with dtype_of, launch and finish"
        )
    if reduce_dtype is not None:
        raise ValueError(
            f"reduce_dtype={reduce_dtype} beside a wire, whose dtype_of says what "
            "travels. Leave one of them out."
        )
    return wire


class BFloat16Wire:
    """Gradients travel in bfloat16 and are summed in float32.

    Each rank receives its slice of everybody's bucket (all-to-all), averages it in
    float32, and sends the average to all (all-gather): half the bytes of a ring
    all-reduce in float32. The average is rounded once, not once per rank. The
    all-gather starts in `finish`, so nothing hides it.

    Args:
        group: the ranks, those of the reducer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        return gradient

    def launch(self, tensors: list[Tensor]) -> Any:
        flat = torch.cat([as_real(t).reshape(-1).bfloat16() for t in tensors])
        padding = -len(flat) % self._size
        sent = torch.nn.functional.pad(flat, (0, padding))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        return work, tensors, sent, received

    def finish(self, launched: Any) -> None:
        work, tensors, sent, received = launched
        work.wait()
        mine = received.view(self._size, -1).float().mean(0).bfloat16()
        all_gather_single(sent, mine, group=self._group)
        numbers = [as_real(t) for t in tensors]
        chunks = sent[: sum(n.numel() for n in numbers)].split(
            [n.numel() for n in numbers]
        )
        for number, chunk in zip(numbers, chunks, strict=True):
            number.copy_(chunk.view(number.shape))
