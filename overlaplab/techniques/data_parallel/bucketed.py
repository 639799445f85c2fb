"""Bucketed gradient reduction: send a bucket as soon as its last gradient is there.

The backward pass makes the last layer's gradients first. They travel while the
layers before are still computing. Small messages pay latency each, one large message
finds nothing left to hide behind; buckets lie between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.techniques.data_parallel.arguments import cap_of
from overlaplab.techniques.data_parallel.buckets import BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.parameters import ParameterInfo
from overlaplab.techniques.data_parallel.reducer import Reducer


class BucketedReducer(Reducer):
    """Averages gradients in buckets that are launched during the backward pass.

    Each bucket is one asynchronous, coalesced all-reduce on the gradients themselves:
    nothing is copied into a buffer. Buckets are launched in the plan's order, whatever
    order gradients arrive in, so ranks always meet in the same bucket. On NCCL the
    collectives run on a communicator of their own at high priority.

    After Li et al., PyTorch Distributed (VLDB 2020); without its flat buffers.

    Args:
        model: on the rank's device; rank 0's values are broadcast.
        bucket_mib: cap of a bucket, in MiB of gradients.
        first_bucket_mib: cap of each dtype's first bucket, `bucket_mib` if None.
        process_group: the ranks; the world if None.
        max_in_flight: at most this many buckets launched and not finished. A side
            stream waits for the oldest, not the compute stream; with gloo the CPU
            does. It bounds the copies that `reduce_dtype` makes; without copies it
            bounds nothing that costs memory.
        reduce_dtype: dtype on the wire, e.g. torch.float32 for bfloat16 gradients;
            the average is cast back. None keeps the gradients' own; complex gradients
            always keep theirs.

    Raises:
        ValueError: a cap is not positive; nothing to train; sparse parameters.
        MismatchError: the ranks' models differ.

    Example:
        reducer = BucketedReducer(model)
        loss = model(tokens, targets)
        loss.backward()       # buckets leave during this call
        reducer.wait()        # averages are in .grad
        optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_mib: float = 25.0,
        first_bucket_mib: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        max_in_flight: int | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._cap_bytes = cap_of("bucket_mib", bucket_mib)
        self._first_cap_bytes = (
            None
            if first_bucket_mib is None
            else cap_of("first_bucket_mib", first_bucket_mib)
        )
        super().__init__(
            model,
            process_group=process_group,
            max_in_flight=max_in_flight,
            reduce_dtype=reduce_dtype,
        )

    def _make_plan(self, parameters: list[tuple[str, Tensor]]) -> BucketPlan:
        return plan_buckets(parameters, self._cap_bytes, self._first_cap_bytes)

    def _watch(self, slot: ParameterInfo) -> None:
        """Call back whenever the gradient of `slot` has been accumulated.

        This runs for every parameter while the CPU races ahead of the GPU: it
        counts, notes the stream, and does nothing else.
        """
        stream_key = self._stream_key

        def on_gradient(_: Tensor) -> None:
            if not self._open:
                self._open_step()
            if slot.step == self._step:
                self._arrived_again(slot)
                return
            slot.step = self._step
            bucket = slot.bucket
            bucket.writers[stream_key()] = None
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_full()

        register: Any = slot.parameter.register_post_accumulate_grad_hook
        slot.handle = register(on_gradient)

    def _launch_full(self) -> None:
        """Launch every bucket that is full and has only launched ones before it."""
        while len(self._launched) < len(self._buckets):
            if self._buckets[len(self._launched)].missing:
                return
            self._launch_next()

    def _arrived_again(self, slot: ParameterInfo) -> None:
        """A second gradient in one step is fine until the bucket has been sent."""
        if slot.bucket.index < len(self._launched):
            raise RuntimeError(
                f"{slot.name} got a second gradient in one step, after bucket "
                f"{slot.bucket.index} with its first one had been sent. Call "
                "reducer.wait() between two backwards on one graph; with activation "
                "checkpointing pass use_reentrant=False."
            )
