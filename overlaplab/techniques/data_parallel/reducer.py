"""Bucketed gradient reduction: send a bucket as soon as its last gradient is there.

The backward pass makes the last layer's gradients first. They travel while the
layers before are still computing. Small messages pay latency each, one large message
finds nothing left to hide behind; buckets lie between.

A step is *open* from its first gradient, its buckets are *sent* one by one, and
`wait` ends it. Nothing happens in a forward.
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
from overlaplab.techniques.data_parallel.wire import AllReduce
from overlaplab.techniques.groups import exchange, number_in, own_group
from overlaplab.techniques.in_flight import InFlight, Payload, Wire
from overlaplab.techniques.model_facts import ModelFacts, ParameterInfo, marks_of


class BucketedReducer(JoinableReducer):
    """Averages gradients over ranks, in buckets launched during the backward pass.

    Each bucket is one asynchronous, coalesced all-reduce on the gradients themselves:
    nothing is copied into a buffer. Buckets are launched in the plan's order, whatever
    order gradients arrive in, so ranks always meet in the same bucket. On NCCL the
    collectives run on a communicator of their own at high priority.

    At construction rank 0's parameters and buffers go to all ranks. One step is: any
    number of forwards, one backward, `wait()`, the optimizer; with more backwards, all
    but the last inside `no_sync()`; where ranks have different numbers of batches, the
    loop inside `join()`. Until `wait()` the gradients belong to the reducer:
    no optimizer, clipping or zeroing before it. Gradients of `torch.autograd.grad`
    never reach a hook and are not averaged.

    After Li et al., PyTorch Distributed (VLDB 2020); without its flat buffers.

    Args:
        model: on the rank's device; rank 0's values are broadcast.
        bucket_mib: cap of a bucket, in MiB of gradients. None: 25, and more for large
            models, see `default_cap_bytes`. A slow link wants smaller ones.
        first_bucket_mib: cap of each dtype's first bucket, `bucket_mib` if None.
        process_group: the ranks; the world if None.
        max_in_flight: at most this many buckets launched and not finished. A side
            stream waits for the oldest, not the compute stream; with gloo the CPU
            does. It bounds the copies that `reduce_dtype` makes; without copies it
            bounds nothing that costs memory.
        reduce_dtype: dtype on the wire, e.g. torch.float32 for bfloat16 gradients;
            the average is cast back. None keeps the gradients' own; complex gradients
            always keep theirs.
        wire: how averages are made, instead of an all-reduce; see `Wire`.

    Attributes:
        plan: what travels together, of the parameters that train.

    Raises:
        ValueError: a cap is not positive; what `ModelFacts` refuses; a parameter that
            has a reducer already; no process group.
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
        cap = cap_bytes("bucket_mib", 25 if bucket_mib is None else bucket_mib)
        first = cap_bytes(
            "first_bucket_mib", 25 if first_bucket_mib is None else first_bucket_mib
        )
        group = process_group or own_group()
        self._group = group
        self._wire: Wire = wire or AllReduce(group, reduce_dtype)
        self._in_flight = InFlight(self._wire, max_in_flight)
        self._facts = ModelFacts(model, group)
        for info in self._facts.parameters:
            if watcher_of(info) is not None:
                raise ValueError(
                    f"parameter {info.name} has a reducer already. Call its remove() "
                    "first."
                )
        self._facts.broadcast()
        if bucket_mib is None:
            cap = default_cap_bytes(self._facts.num_bytes)
        self._caps = cap, cap if first_bucket_mib is None else first
        self._flags = Flags(self._facts)
        self._arrivals = Arrivals(
            self._facts.parameters, self._backward_begins, self._full
        )
        self._provider = streams.provider()
        self._on_cuda = self._facts.tensors[0].is_cuda
        self._num_steps = 0
        self._windows = 0  # of no_sync that are open
        self._removed = False
        self._number = number_in(group)
        self._make_plan()
        step_members.join(self)
        _alive.add(self)

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self._num_steps

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """The model's, frozen ones included."""
        return self._facts.parameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of each of `parameters`."""
        return [(info.name, info.parameter) for info in self.parameters]

    # What people call.

    def wait(self) -> None:
        """End the step: the averaged gradients are in `.grad`, safe on this stream.

        Sends what has not been (parameters without a gradient hold up their bucket
        until here) and makes the current stream wait for all of it. The CPU goes on,
        except with gloo, and where a rank reads flags, see [Note: parameters without a
        gradient]. Collective: every rank calls it once per step, also a rank that had
        no backward.

        Raises:
            RuntimeError: a backward of the step raised; a parameter or a gradient was
                written, replaced or freed while the step was open; called inside
                `no_sync()` or after `remove()`. A step stays open: `abandon()` gives
                it up.
        """
        if self._windows:
            raise RuntimeError("reducer.wait() inside no_sync(); leave the block first")
        if self._removed:
            raise RuntimeError("reducer.wait() after remove(); build a new reducer")
        self._facts.check_identity()
        self._refuse_broken_step("reducer.wait()")
        with torch.no_grad():
            if not self._arrivals.is_open:
                self._open()
            self._arrivals.announce_rest()
            if (info := self._in_flight.touched()) is not None:
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

        What counts is where the backward runs; the forward may be on either side. If no
        backward follows, `wait()` sends. Gradients add up in `.grad` itself, and each
        bucket is sent once. Blocks nest; an exception leaves them.
        """
        before, self._arrivals.paused = self._arrivals.paused, True
        self._windows += 1
        try:
            yield
        finally:
            self._windows -= 1
            self._arrivals.paused = before

    def broadcast_buffers(self) -> None:
        """Give every rank the group's first rank's buffers (running means). Blocks."""
        self._refuse_in_join("reducer.broadcast_buffers()")
        self._facts.broadcast(parameters=False)

    def abandon(self) -> None:
        """Give up the open step, after an error in it; zero the gradients then.

        Collective: every rank calls it, instead of `wait()`. Ranks that have sent
        fewer buckets than others send more, so that they meet again in the next step.
        """
        self._refuse_in_join("reducer.abandon()")
        mine = len(self._in_flight)
        sent = exchange(self._group, f"abandon {self._number}.{self._num_steps}", mine)
        with torch.no_grad():
            while self._arrivals.next < max(sent):
                self._arrivals.announce_next()
            self._in_flight.finish()
        self._end_step()

    def remove(self) -> None:
        """Take the reducer off the model. What was sent is waited for."""
        with torch.no_grad():
            self._in_flight.finish()
        self._end_step()
        self._arrivals.remove()
        step_members.leave(self)
        self._removed = True

    def abandon_step(self) -> None:
        """Forget an open step on this rank alone; waits for nothing."""
        self._end_step()

    # A step.

    def _end_step(self) -> None:
        self._num_steps += 1
        self._in_flight.clear()
        self._arrivals.reset()

    def _backward_begins(self) -> None:
        """The first gradient of a backward is here."""
        if self._arrivals.is_open:
            self._refuse_broken_step("this backward")
        else:
            self._open()

    def _open(self) -> None:
        """A step begins, at its first gradient or in a `wait` without one."""
        if self._facts.dtypes() != self._flags.dtypes:  # `model.to`; freezing: `_adopt`
            self._make_plan()
        self._marks = marks_of(self._facts.tensors)
        self._in_flight.wire = self._wire_of_step()

    def _refuse_broken_step(self, what: str) -> None:
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

    def _full(self, bucket: int) -> None:
        """Bucket `bucket`, and all before it, can go."""
        flags = self._write_flags if bucket == len(self.plan) - 1 else None
        members = self._members[bucket]
        writers = self._arrivals.writers(bucket)
        stale = self._arrivals.stale(bucket)
        if self._on_cuda and not streams.ranges_are_wanted():
            self._in_flight.launch(members, writers, flags, stale)
            return
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
        """What the flags change here; see [Note: parameters without a gradient]."""
        changed = self._flags.read(self._in_flight.payloads)
        if not changed or not self._flags.adopt(changed):
            return
        for info in changed:  # trains again on all ranks, and is not in this plan yet
            if info.parameter.requires_grad:
                self._in_flight.launch([info], (), presence)
        self._in_flight.finish()
        for payload in self._in_flight.payloads[len(self.plan) :]:
            take_present(payload)
        self._make_plan()

    def _make_plan(self) -> None:
        """Cut what trains on all ranks into buckets."""
        self._flags.dtypes = self._facts.dtypes()
        members = self._flags.members
        named = [(info.name, info.parameter) for info in members]
        self.plan = plan_buckets(named, *self._caps)
        self._members: list[tuple[ParameterInfo, ...]] = [
            tuple(members[position] for position in bucket.positions)
            for bucket in self.plan
        ]
        self._arrivals.plan([[i.index for i in bucket] for bucket in self._members])


_alive: WeakSet[BucketedReducer] = WeakSet()


@atexit.register
def _let_go_of_groups() -> None:
    """A group of gloo's (torch 2.13) that outlives the interpreter aborts it."""
    for reducer in tuple(_alive):
        vars(reducer).clear()
