"""Bucketed gradient reduction: send a bucket as soon as its last gradient is there.

The backward pass makes the last layer's gradients first. They travel while the
layers before it still compute. Many small messages each pay the latency; one large
message has no computation left to hide behind. Buckets lie between.

A step *opens* with its first gradient, its buckets are *sent* one by one, and `wait`
ends it. Nothing happens in a forward. The way of one gradient through the files stands
in this package's docstring.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import step_members, streams
from overlaplab.techniques.arrivals import Arrivals, watcher_of
from overlaplab.techniques.buckets import (
    BucketPlan,
    cap_bytes,
    default_cap_bytes,
    plan_buckets,
)
from overlaplab.techniques.data_parallel.agreement import (
    Flags,
    presence,
    take_present,
)
from overlaplab.techniques.data_parallel.join import JoinableReducer
from overlaplab.techniques.data_parallel.wire import wire_of
from overlaplab.techniques.groups import (
    checked_group,
    exchange,
    is_registered,
    number_in,
    own_group,
)
from overlaplab.techniques.in_flight import InFlight, Payload, Wire
from overlaplab.techniques.model_facts import ModelFacts, ParameterInfo, marks_of


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
    belong to the reducer: no optimizer, clipping or zeroing in between. Gradients of
    `torch.autograd.grad` never reach a hook and are not averaged.

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

    plan: BucketPlan

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_mib: float | None = None,
        first_bucket_mib: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        max_in_flight: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        wire: Wire | None = None,
    ) -> None:
        super().__init__()
        cap, first = (
            None if mib is None else cap_bytes(name, mib)
            for name, mib in [
                ("bucket_mib", bucket_mib),
                ("first_bucket_mib", first_bucket_mib),
            ]
        )
        group = own_group() if process_group is None else checked_group(process_group)
        self._group = group
        self._wire = wire_of(group, wire, reduce_dtype)
        self._in_flight = InFlight(self._wire, max_in_flight)
        self._facts = ModelFacts(model, group)
        for info in self._facts.parameters:
            if watcher_of(info) is not None:
                raise ValueError(
                    f"parameter {info.name} has a reducer already. Call its remove() "
                    "first."
                )
        self._facts.broadcast()
        if cap is None:
            cap = default_cap_bytes(self._facts.num_bytes)
        self._caps = (cap, cap if first is None else first)
        self._flags = Flags(self._facts)
        self._arrivals = Arrivals(
            self._facts.parameters, self._backward_begins, self._launch
        )
        self._provider = streams.provider()
        self._num_steps = 0
        self._removed = False
        self._number = number_in(group)
        self._make_plan()
        step_members.join(self)
        _reducers.add(self)

    @property
    def num_steps(self) -> int:
        """Steps that have ended, those that were given up included."""
        return self._num_steps

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """The model's, frozen ones included."""
        return self._facts.parameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of each of `parameters`."""
        return [(info.name, info.parameter) for info in self.parameters]

    # What a training loop calls.

    def wait(self) -> None:
        """End the step: the averaged gradients are in `.grad`, safe on this stream.

        Sends the buckets that are left (a parameter without a gradient holds up its
        bucket, and those after it, until here) and makes the current stream wait for
        all. The CPU goes on, except with gloo, and where a rank reads flags, see [Note:
        parameters without a gradient]. Collective: every rank calls it once per step,
        even one that had no backward.

        Raises:
            RuntimeError: a backward of the step raised; a parameter was written while
                the step was open, or a gradient was freed, or replaced or written
                after it had been sent; called inside `no_sync()` or after `remove()`.
                The step stays open until every rank calls `abandon()`. Or: a parameter
                trains here and is frozen elsewhere; the ranks where it is frozen have
                ended the step, so that it cannot be given up any more.
        """
        if self._arrivals.windows:
            raise RuntimeError("reducer.wait() inside no_sync(); leave the block first")
        self._refuse_removed("reducer.wait()")
        self._facts.check_identity()
        self._refuse_broken_step("reducer.wait()")
        with torch.no_grad():
            if not self._arrivals.is_open:
                self._open()
            self._arrivals.announce_rest()
            if (info := self._in_flight.touched() or self._lost()) is not None:
                raise RuntimeError(
                    f"{info.name}.grad was replaced, freed or written between the "
                    "backward pass and reducer.wait(), while its average was on the "
                    "way. Call reducer.wait() first; then clip, step or zero."
                )
            self._in_flight.finish()
            self._adopt()
        self._end_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block only accumulate; the next one after it sends.

        What counts is where the backward runs; the forward may be inside or outside. If
        no backward follows, `wait()` sends. Gradients add up in `.grad` itself, and
        each bucket is sent once. Blocks may be nested; an exception ends them, too.
        """
        with self._arrivals.pausing():
            yield

    def broadcast_buffers(self) -> None:
        """Give the first rank's buffers (running means) to all. Collective; blocks."""
        self._refuse_in_join("reducer.broadcast_buffers()")
        self._facts.broadcast(parameters=False)

    def abandon(self) -> None:
        """Give up the step after an error in it; zero the gradients afterwards.

        Collective: every rank calls it instead of `wait()`, also those without an
        error. Ranks that have sent fewer buckets than others send more, so that all
        meet again in the next step. The CPU waits until every rank has called it.

        Raises:
            RuntimeError: inside `join()`, or after `remove()`; a rank does not come;
                the process group was destroyed, and ranks can meet no more.
        """
        self._refuse_in_join("reducer.abandon()")
        self._refuse_removed("reducer.abandon()")
        self._refuse_destroyed_group()
        if not self._arrivals.is_open:
            self._open()  # it may have to send buckets of the others' plan
        mine = self._arrivals.next  # buckets that have been sent
        call = f"reducer.abandon() of step {self._num_steps}"
        if self._number > 1:
            call += f" of reducer {self._number}"
        sent = exchange(self._group, call, mine)
        with torch.no_grad():
            while self._arrivals.next < max(sent):
                self._arrivals.announce_next()
            self._in_flight.finish()
        self._end_step()

    def remove(self) -> None:
        """Take the hooks off the model; gradients stay local from now on.

        Call it between steps, or on all ranks after the same bucket: it waits for those
        that were sent.
        """
        try:
            with torch.no_grad():
                self._in_flight.finish()
        finally:
            self._in_flight.clear()
            self._arrivals.reset()
            self._arrivals.remove()
            step_members.leave(self)
            self._removed = True

    def abandon_step(self) -> None:
        """Forget the open step on this rank alone; waits for nothing.

        For `ol.capture_step`, see `StepMember`; after an error in a usual step call
        `abandon`.
        """
        self._end_step()

    # The course of a step.

    def _end_step(self) -> None:
        self._num_steps += 1
        self._in_flight.clear()
        self._arrivals.reset()

    def _backward_begins(self) -> None:
        """`Arrivals` has the first gradient of a backward, maybe not of the step."""
        if self._arrivals.is_open:
            self._refuse_broken_step("this backward")
        else:
            self._open()

    def _open(self) -> None:
        """A step begins, at its first gradient or in a `wait` without one."""
        self._refuse_destroyed_group()
        if self._facts.dtypes() != self._dtypes:  # after `model.to(dtype)`
            self._make_plan()
        self._marks = marks_of(self._facts.tensors)
        self._in_flight.wire = self._wire_of_step()
        self._arrivals.is_open = True  # also where `wait` or `abandon` opens it

    def _refuse_destroyed_group(self) -> None:
        if not is_registered(self._group):
            raise RuntimeError(
                "the reducer's process group has been destroyed since it was built "
                "(destroy_process_group). Call reducer.remove() and build a new one."
            )

    def _refuse_removed(self, what: str) -> None:
        if self._removed:
            raise RuntimeError(f"{what} after remove(); build a new reducer")

    def _refuse_broken_step(self, what: str) -> None:
        """Raise if a backward of the open step failed or a parameter was written."""
        if not self._arrivals.is_open:
            return
        if self._arrivals.backward_failed:
            raise RuntimeError(
                f"a backward of step {self._num_steps} raised before it ended: "
                f"{len(self._in_flight)} of {len(self.plan)} buckets were sent, so "
                f"{what} cannot go on. Call reducer.abandon() on every rank instead "
                "of reducer.wait(), and zero the gradients."
            )
        now = marks_of(self._facts.tensors)
        if now == self._marks:
            return
        same = [a == b for a, b in zip(now, self._marks, strict=True)]
        name = self.parameters[same.index(False)].name
        raise RuntimeError(
            f"parameter {name} was changed while step {self._num_steps} was open, "
            f"before {what}: it was updated with a gradient that is not averaged, and "
            "ranks differ from here on. Call reducer.wait() between loss.backward() "
            "and optimizer.step()."
        )

    def _lost(self) -> ParameterInfo | None:
        """A parameter whose gradient was freed before it could be sent."""
        absent = [info for p in self._in_flight.payloads for info, _ in p.absent]
        return next((i for i in absent if self._arrivals.arrived(i.index)), None)

    def _launch(self, bucket: int) -> None:
        """Send a bucket: it and all before it are full, or the step is ending."""
        flags = self._write_flags if bucket == len(self.plan) - 1 else None
        members = self._members[bucket]
        writers = self._arrivals.writers(bucket)
        stale = self._arrivals.stale(bucket)
        with (
            self._provider.annotate(type(self).__name__),
            self._provider.annotate(f"bucket {bucket}"),
        ):
            self._in_flight.launch(members, writers, flags, stale)

    def _write_flags(self, last: Payload) -> Tensor:
        payloads = (*self._in_flight.payloads, last)
        absent = [info for payload in payloads for info, _ in payload.absent]
        return self._flags.write(absent, last.tensors[0])

    def _adopt(self) -> None:
        """Do what the flags say; see [Note: parameters without a gradient]."""
        changed = self._flags.read(self._in_flight.payloads)
        if not changed or not self._flags.adopt(changed):
            return
        # Those that train again are in no bucket of this step.
        if unfrozen := [info for info in changed if info.parameter.requires_grad]:
            self._provider.synchronize()  # no hook has noted which stream wrote them
            for info in unfrozen:
                self._in_flight.launch([info], (), presence)
            self._in_flight.finish()
        for payload in self._in_flight.payloads[len(self.plan) :]:
            take_present(payload)
        self._make_plan()

    def _make_plan(self) -> None:
        """Cut what trains on all ranks into buckets; between steps, on all ranks."""
        self._dtypes = self._facts.dtypes()
        members = self._flags.members
        named = [(info.name, info.parameter) for info in members]
        self.plan = plan_buckets(named, *self._caps)
        self._members: list[tuple[ParameterInfo, ...]] = [
            tuple(members[position] for position in bucket.positions)
            for bucket in self.plan
        ]
        self._arrivals.plan([[i.index for i in bucket] for bucket in self._members])


_reducers: WeakSet[BucketedReducer] = WeakSet()


@atexit.register
def _let_go_of_groups() -> None:
    """A gloo group that is freed after the interpreter's end aborts (torch 2.13)."""
    for reducer in tuple(_reducers):
        vars(reducer).clear()
