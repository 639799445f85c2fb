"""Lab 06 as we would solve it: what a check puts in the place of the other half.

The check of 6.3 runs a learner's finish behind `install_hooks`, the check of 6.2 a
learner's hooks before `finish`, so that neither exercise waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab_course.lab06.state import ReducerState


def plan_buckets(params: Sequence[Tensor], cap_bytes: int) -> list[list[int]]:
    """6.1: buckets in the order in which they become full."""
    if cap_bytes <= 0:
        raise ValueError(f"cap_bytes must be positive, got {cap_bytes}")
    buckets: list[list[int]] = []
    is_open: dict[torch.dtype, list[int]] = {}
    room: dict[torch.dtype, int] = {}
    for position in reversed(range(len(params))):
        param = params[position]
        if not param.requires_grad:
            continue
        size = param.numel() * param.element_size()
        if param.dtype not in is_open or size > room[param.dtype]:
            is_open[param.dtype] = []
            room[param.dtype] = cap_bytes
            buckets.append(is_open[param.dtype])
        is_open[param.dtype].append(position)
        room[param.dtype] -= size
    return sorted(buckets, key=lambda bucket: -bucket[-1])


def install_hooks(state: ReducerState) -> None:
    """6.2: pack and launch each bucket when its last gradient arrives, in order."""

    def hook(param: Tensor) -> None:
        state.missing[state.bucket_of(param)] -= 1
        for bucket, work in enumerate(state.works):
            if work is not None:
                continue
            if state.missing[bucket] > 0:
                return
            launch(state, bucket)

    for param in state.params:
        register: Any = param.register_post_accumulate_grad_hook
        state.handles.append(register(hook))


def launch(state: ReducerState, bucket: int) -> None:
    """Fill the bucket's buffer, zeros where there is no gradient, and send it."""
    for param, place in state.pairs(bucket):
        if param.grad is None:
            place.zero_()
        else:
            place.copy_(param.grad)
    state.works[bucket] = dist.all_reduce(state.buffers[bucket], async_op=True)


def finish(state: ReducerState, divide: bool = True) -> None:
    """6.3: send what was not sent, wait, write the mean into .grad, start anew.

    A check of 6.2 passes divide=False: what comes back is then the sum, or already
    the mean where the hooks have asked for it.
    """
    num_ranks = dist.get_world_size() if divide else 1
    for bucket, work in enumerate(state.works):
        if work is None:
            launch(state, bucket)
    for bucket, work in enumerate(state.works):
        work.wait()
        if state.buffers[bucket] is None:  # the gradients themselves were reduced
            for position in state.plan[bucket]:
                grad = state.params[position].grad
                if grad is not None:
                    grad.div_(num_ranks)
            continue
        for param, place in state.pairs(bucket):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(place).div_(num_ranks)
    state.missing = [len(bucket) for bucket in state.plan]
    state.works = [None] * len(state.plan)
