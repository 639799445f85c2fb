"""Gradients one step late: a whole step of computation hides each all-reduce.

Within a step only the rest of the backward pass can hide a gradient's message. Where
that is too short (a slow link, a small batch), there are two sets of gradients: one
is averaged over the ranks while the next backward fills the other. The price: the
optimizer gets the average of the step before, and one more set of gradients lives.

The course of a step is that of `BucketedReducer`: see `data_parallel`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from overlaplab.techniques.buckets import size_text
from overlaplab.techniques.data_parallel.agreement import Average
from overlaplab.techniques.data_parallel.base import StepwiseReducer
from overlaplab.techniques.double_buffer import averages
from overlaplab.techniques.groups import exchange
from overlaplab.techniques.in_flight import InFlight
from overlaplab.techniques.payload import Wire, written


class DoubleBufferedReducer(StepwiseReducer):
    """Averages gradients over ranks and gives each average one step late.

    In step n `wait()` leaves the average of step n - 1 in `.grad`, and None in step 0,
    so that optimizers skip it: w[n+1] = update(w[n], gradient[n-1] at w[n-1]). The
    messages of step n leave during its backward and have until the `wait()` of step
    n + 1: its whole forward and backward hide them, and a step is as long as the longer
    of computing and sending. What it costs: a second set of gradients (`extra_bytes`),
    and gradients of old weights, which want a smaller learning rate. Where the loss has
    the curvature L, plain gradient descent is stable up to 1/L; in time, up to 2/L.
    `flush()` gives the last average after the last step.

    Everything else is as in `BucketedReducer`: buckets, the communicator, what happens
    with parameters that some rank does not use, what is refused and when. There is no
    `join()`. Zero the gradients in every step, in place or to None. A step in which
    this rank has frozen or unfrozen something waits for its own messages as well. What
    froze still gets its last average: `flush()` first where it must not move.
    Not for `ol.capture_step`: a replayed graph would have to end while the messages of
    its step are on the way. Not with a `GradScaler`, which would unscale an average by
    the scale of the next step.

    After one-step-delayed updates: Langford et al., Slow Learners are Fast (NIPS 2009).

    Args:
        model: on the rank's device; the first rank's values are broadcast.
        bucket_mib: cap of a bucket, in MiB of gradients, as in `BucketedReducer`.
        process_group: the ranks; the world if None.
        reduce_dtype: dtype on the wire; where it is not the gradients' own, copies in
            it live beside both sets, from the backward to the next step's `wait()`.
        wire: what makes the averages instead of an all-reduce, see `Wire`.

    Attributes:
        plan: what travels together, of the parameters that train.

    Raises:
        ValueError, TypeError, MismatchError: as `BucketedReducer`.

    Example:
        reducer = DoubleBufferedReducer(model)
        for batch in batches:
            model(batch).backward()   # buckets of this step leave during this call
            reducer.wait()            # the average of the step before is in .grad
            optimizer.step()
            optimizer.zero_grad()
        if reducer.flush():           # the last average
            optimizer.step()
    """

    _guard: averages.LateGuard
    _guard_type = averages.LateGuard

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_mib: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(
            model,
            bucket_mib=bucket_mib,
            process_group=process_group,
            reduce_dtype=reduce_dtype,
            wire=wire,
        )
        # The step before: on the way in `_before`, or waited for in `_average`.
        self._before = InFlight(self._wire)
        self._average: list[Average] | None = None
        self._num_loads = self._num_flushes = 0

    @property
    def extra_bytes(self) -> int:
        """Of a second set of gradients, and of copies if they travel as such."""
        trains = [p for p in self._facts.tensors if p.requires_grad]
        dtypes = [{p.dtype, self._wire.dtype_of(p.dtype)} for p in trains]
        sizes = [sum(dtype.itemsize for dtype in both) for both in dtypes]
        return sum(p.numel() * n for p, n in zip(trains, sizes, strict=True))

    @property
    def pending(self) -> bool:
        """Whether there is an average that `wait` or `flush` has still to give."""
        return len(self._before) > 0 or self._average is not None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}: gradients one step late, "
            f"{size_text(self.extra_bytes)} for a second set of them"
        )

    def summary(self) -> str:
        """What it does, what it costs and wins, and the plan, in a few lines."""
        return (
            f"{self!r}\n"
            "an update uses the average of the step before; flush() gives the last\n"
            "messages have the whole next step: it is as long as the longer of "
            "computing and sending\n"
            f"{self.plan}"
        )

    def wait(self) -> None:
        """End the step: the averages of the step before it are in `.grad`.

        They are safe on the current stream; `.grad` is None everywhere in step 0 and
        after `flush()`. Sends the buckets that are left, as `BucketedReducer.wait`,
        takes this step's gradients out of `.grad`, and makes the current stream wait
        for the messages of the step before, not for this step's. The CPU goes on,
        except with gloo, and where a rank reads flags, see [Note: parameters without a
        gradient]. Collective: every rank calls it once per step, even one that had no
        backward.

        Raises:
            RuntimeError: as `BucketedReducer.wait`; or a gradient of the step before
                was written while its average was on the way.
        """
        steps = self._steps
        steps.send_rest()
        average = self._settle()
        own = self._finish_own() if steps.agreement.changed else None
        for payload in steps.in_flight.payloads:
            for info in payload.holders:
                info.parameter.grad = None  # this step's: on the way
        self._average = own
        if own is None:
            steps.in_flight, self._before = self._before, steps.in_flight
        self._give(average)
        steps.end()

    def flush(self) -> bool:
        """Put the last average in `.grad`; step the optimizer once more if there was.

        Between steps. Collective where an average is pending: every rank calls it, and
        the CPU waits for all, since ranks of which some flush would train apart. The
        current stream waits for the average. Training may go on: the next `wait()` is
        as in step 0. Whatever was in `.grad` is replaced.

        Returns:
            Whether there was an average. False, and `.grad` stays, if not.

        Raises:
            RuntimeError: a step is open; after `remove()`; a rank does not come.
        """
        self._guard.refuse_removed("reducer.flush()")
        self._refuse_open("reducer.flush()")
        if not self.pending:
            return False
        if not is_fake(self.parameters[0].parameter):
            self._num_flushes += 1
            call = f"flush() {self._num_flushes} of reducer {self._number}"
            exchange(self._group, call, self.num_steps)
        average, self._average = self._settle(), None
        for info in self.parameters:
            if info.parameter.requires_grad:
                info.parameter.grad = None
        self._give(average)
        return True

    def state_dict(self) -> averages.State:
        """What a checkpoint needs beside the model and the optimizer.

        Between steps. Makes the current stream wait for the average that is on the way,
        which is equal on all ranks; the next `wait()` still gives it.

        Returns:
            {"average": None}, or under it the average by parameter name; parameters
            that no rank used are left out. Copies, which the caller owns.

        Raises:
            RuntimeError: a step is open; after `remove()`.
        """
        self._guard.refuse_removed("reducer.state_dict()")
        self._refuse_open("reducer.state_dict()")
        return averages.saved(self._settle())

    def load_state_dict(self, state: averages.State) -> None:
        """Take the pending average of `state_dict()`; drop one's own.

        Between steps, after the model's state and the optimizer's; the next `wait()` or
        `flush()` gives it. Copies; the first rank's values count. Collective: every
        rank calls it, and the CPU waits for all.

        Raises:
            ValueError: not such a state; an unknown name; another shape or dtype than
                the parameter's. Nothing has changed.
            MismatchError: ranks load averages of different parameters.
            RuntimeError: a step is open; after `remove()`; a rank does not come.
        """
        self._guard.refuse_removed("reducer.load_state_dict()")
        self._refuse_open("reducer.load_state_dict()")
        average = averages.loaded(state, self.parameters)
        self._num_loads += 1
        call = f"load_state_dict() {self._num_loads} of reducer {self._number}"
        averages.agree_on(average, self._group, call)
        self._facts.broadcast([grad for _, grad in average or ()])
        self._settle()  # whose memory it is must wait before it is dropped
        self._average = average

    def remove(self) -> None:
        """Take the hooks off the model; gradients stay local from now on.

        Call it between steps, or on all ranks after the same bucket: it waits for those
        that were sent. An average that has not been given is dropped: `flush()` first.
        """
        try:
            with torch.no_grad():
                self._before.finish()
        finally:
            self._before.clear()
            self._average = None
            super().remove()

    def _settle(self) -> list[Average] | None:
        """Make the current stream wait for what is on the way; None if nothing is."""
        if not len(self._before):
            return self._average
        if (info := written(self._before.payloads)) is not None:
            raise RuntimeError(
                f"the gradient of {info.name} of the step before was written while its "
                "average was on the way. What was in .grad before reducer.wait() "
                "belongs to the reducer; read and write what is there after it."
            )
        with torch.no_grad():
            self._before.finish()
            self._average = averages.of(self._before)
            elsewhere = self._steps.agreement.averages_elsewhere(self._before.payloads)
            self._average += elsewhere
        self._before.clear()
        return self._average

    def _finish_own(self) -> list[Average]:
        """Where something froze or trains again: as in `BucketedReducer`, at once."""
        elsewhere = self._steps.finish()
        return averages.of(self._steps.in_flight) + elsewhere

    def _give(self, average: list[Average] | None) -> None:
        for info, grad in average or ():
            dtype = info.parameter.dtype  # another one after `model.to(dtype)`
            info.parameter.grad = grad if grad.dtype is dtype else grad.to(dtype)
        self._guard.gave(average)

    def _refuse_open(self, what: str) -> None:
        if self._steps.arrivals.is_open:
            raise RuntimeError(
                f"{what} while step {self.num_steps} is open. Call reducer.wait() "
                "after the backward pass first."
            )
