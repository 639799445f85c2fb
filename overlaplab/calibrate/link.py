"""Collectives by size, alone; `contention` has what they cost beside computing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.calibrate.clock import Call, device_ns, on_cuda
from overlaplab.calibrate.plan import CalibrationPlan

Row = dict[str, Any]


def measure_link(plan: CalibrationPlan, report: Callable[[str], None]) -> Row:
    """All-reduces by size. Collective; 2 ranks or more.

    Returns:
        "num_ranks"; "collectives", rows {"operation", "bytes", "tensors", "ns"} of each
        alone on the current stream.
    """
    report("collectives")
    return {
        "num_ranks": dist.get_world_size(),
        "collectives": [
            {
                "operation": "all_reduce",
                "bytes": num_bytes,
                "tensors": num_tensors,
                "ns": device_ns(
                    _all_reduce(num_tensors, num_bytes),
                    20 if num_bytes <= 2**24 else 4,
                    repeats=plan.repeats if num_bytes <= 2**27 else 2,
                    align=align(),
                ),
            }
            for num_tensors, num_bytes in (
                *((1, num_bytes) for num_bytes in plan.wire_bytes),
                *plan.coalesced,
            )
        ],
    }


def _all_reduce(num_tensors: int, num_bytes: int) -> Call:
    """Averages one tensor, or several equal ones in one call, as reducers launch it."""
    if num_tensors == 1:
        return partial(dist.all_reduce, tensor(num_bytes // 2), average())
    tensors = [tensor(num_bytes // num_tensors // 2) for _ in range(num_tensors)]
    return coalesced(tensors, is_async=not on_cuda())


def coalesced(tensors: list[torch.Tensor], *, is_async: bool) -> Call:
    """A call that averages `tensors` in one collective, and waits for it if async."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(average())
    options.asyncOp = is_async
    group = dist.group.WORLD
    assert group is not None

    def call() -> None:
        work = group.allreduce_coalesced(tensors, options)
        if is_async:
            work.wait()

    return call


def align() -> Call:
    """A small collective: ranks that waited for it start together."""
    return partial(dist.all_reduce, tensor(1))


def average() -> Any:
    return dist.ReduceOp.AVG if on_cuda() else dist.ReduceOp.SUM


def tensor(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.bfloat16, device=streams.device())
