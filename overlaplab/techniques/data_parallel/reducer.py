"""Bucketed gradient reduction: send a bucket as soon as its last gradient is there.

The backward pass makes the last layer's gradients first. They travel while the
layers before it still compute. Many small messages each pay the latency; one large
message has no computation left to hide behind. Buckets lie between.

What a training loop calls stands here and in `base`; what happens then, in the files
that this package's docstring names.
"""

from __future__ import annotations

from overlaplab.techniques.data_parallel.join import JoinableReducer


class BucketedReducer(JoinableReducer):
    """Averages gradients over ranks, in buckets launched during the backward pass.

    Each bucket is one asynchronous, coalesced all-reduce on the gradients themselves:
    nothing is copied into a buffer. Buckets are launched in the plan's order, whatever
    order gradients arrive in, so ranks always meet in the same bucket. On NCCL, unless
    `process_group` is given, they use a communicator of their own at high priority.

    At construction the group's first rank gives its parameters and buffers to all. One
    step is: any number of forwards, one backward, `wait()`, the optimizer; with more
    backwards, all but the last inside `no_sync()`; where ranks have different numbers
    of batches, the loop inside `join()`. From the backward until `wait()` the gradients
    belong to the reducer: no optimizer, clipping, unscaling or zeroing in between. It
    raises in `wait()`, except where torch does not count a write: through `.data`, and
    in `GradScaler.unscale_`. Gradients of `torch.autograd.grad` never reach a hook and
    are not averaged.

    Several reducers: build them, and run their backwards and waits, in one order on all
    ranks. A message has no name: of two with equal shapes, one is taken for the other.

    After Li et al., PyTorch Distributed (VLDB 2020); without its flat buffers.

    Args:
        model: on the rank's device; the first rank's values are broadcast.
        bucket_mib: cap of a bucket, in MiB of gradients. None: 25, and more for large
            models, see `default_cap_bytes`. A slow link wants smaller ones.
        first_bucket_mib: cap of each dtype's first bucket, `bucket_mib` if None.
        process_group: the ranks; the world if None.
        max_in_flight: at most this many buckets launched and not finished; None: no
            bound. A side stream, and not the compute stream, waits for the oldest; with
            gloo the CPU waits. It bounds the memory of the copies that `reduce_dtype`
            makes; without copies it saves no memory.
        reduce_dtype: dtype on the wire, e.g. torch.float32 for bfloat16 gradients;
            the average is cast back. None keeps the gradients' own; complex gradients
            always keep theirs. Not with a `wire`, which has its own.
        wire: what makes the averages instead of an all-reduce, see `Wire`.

    Attributes:
        plan: what travels together, of the parameters that train.

    Raises:
        ValueError: a cap is not positive; what `ModelFacts` refuses; a parameter that
            has a reducer already; no process group, or one without this rank.
        TypeError: a setting of the wrong type; a `wire` that is none.
        MismatchError: the ranks' models differ.

    Example:
        reducer = BucketedReducer(model)
        loss = model(tokens, targets)
        loss.backward()       # buckets leave during this call
        reducer.wait()        # averages are in .grad
        optimizer.step()
    """

    def wait(self) -> None:
        """End the step: the averaged gradients are in `.grad`, safe on this stream.

        Sends the buckets that are left (a parameter without a gradient holds up its
        bucket, and those after it, until here) and makes the current stream wait for
        all. The CPU goes on, except with gloo, and where a rank reads flags, see
        agreement, [Note: parameters without a gradient]. Collective: every rank calls
        it once per step, even one that had no backward.

        Raises:
            RuntimeError: a backward of the step raised; a parameter was written while
                the step was open, or a gradient was freed, or replaced or written
                after it had been sent; called in a hook, inside `no_sync()` or after
                `remove()`. The step stays open until every rank calls `abandon()`.
                Or: a parameter trains here and is frozen elsewhere; the ranks where it
                is frozen have ended the step, so that it cannot be given up any more.
        """
        self._steps.wait()
