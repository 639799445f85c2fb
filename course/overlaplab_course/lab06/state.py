"""What the two halves of lab 06's reducer share: `ReducerState`.

The hooks (exercise 6.2) write it while the backward pass runs; the finish (6.3) reads
it after. It holds data and no policy: when a bucket is sent, and what is done with
what comes back, is for the learner to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from overlaplab.streams import name_tensor


@dataclass
class ReducerState:
    """Everything that a bucketed reducer knows between two optimizer steps.

    Args:
        params: the trainable parameters, in registration order. A tied weight is in
            here once.
        plan: `plan[b]` lists the positions in `params` of bucket b, in the order in
            which their gradients arrive. Buckets are launched in this order, on
            every rank.
        buffers: `buffers[b]` is flat, of the bucket's dtype, with room for each of
            its gradients. After the bucket's all-reduce has been waited for, it holds
            the SUM over ranks. Put another flat tensor there if you like, or None if
            you all-reduce the `.grad` tensors themselves.
        missing: `missing[b]` gradients of bucket b have not arrived in this step.
        works: `works[b]` is what the launch of bucket b returned (anything with a
            `wait()`), None as long as b has not been launched in this step.
        handles: what `register_post_accumulate_grad_hook` returned.
    """

    params: list[nn.Parameter]
    plan: list[list[int]]
    buffers: list[Tensor | None]
    missing: list[int]
    works: list[Any]
    handles: list[Any] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, plan: Sequence[Sequence[int]]) -> ReducerState:
        """A state at the start of a step: nothing has arrived, nothing is launched."""
        params = [p for p in model.parameters() if p.requires_grad]
        buffers: list[Tensor | None] = []
        for number, bucket in enumerate(plan):
            first = params[bucket[0]]
            numel = sum(params[position].numel() for position in bucket)
            buffer = torch.zeros(numel, dtype=first.dtype, device=first.device)
            name_tensor(buffer, f"buffer of bucket {number}")
            buffers.append(buffer)
        return ReducerState(
            params=params,
            plan=[list(bucket) for bucket in plan],
            buffers=buffers,
            missing=[len(bucket) for bucket in plan],
            works=[None] * len(plan),
        )

    def bucket_of(self, param: Tensor) -> int:
        """The bucket that `param` belongs to."""
        for number, bucket in enumerate(self.plan):
            if any(self.params[position] is param for position in bucket):
                return number
        raise ValueError(
            f"a tensor of shape {tuple(param.shape)} is in no bucket of the plan; "
            "pass a parameter of state.params (a hook receives the parameter)"
        )

    def pairs(self, bucket: int) -> list[tuple[nn.Parameter, Tensor]]:
        """The bucket's parameters, each with its place in the flat buffer.

        The place is a view of the buffer in the parameter's shape: `copy_` into it
        fills the buffer, `copy_` from it reads the buffer.
        """
        buffer = self.buffers[bucket]
        if buffer is None:
            raise ValueError(
                f"buffers[{bucket}] is None: this bucket was reduced in the .grad "
                "tensors themselves and has no flat buffer to take a view of"
            )
        pairs = []
        offset = 0
        for position in self.plan[bucket]:
            param = self.params[position]
            place = buffer[offset : offset + param.numel()].view(param.shape)
            pairs.append((param, place))
            offset += param.numel()
        return pairs

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
