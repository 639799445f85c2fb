"""Bucketed gradient reduction: send a bucket as soon as its last gradient is there.

The backward pass makes the last layer's gradients first. They travel while the
layers before are still computing. Small messages pay latency each, one large message
finds nothing left to hide behind; buckets lie between.

A step is *open* from its first gradient, its buckets are *sent* one by one, and
`wait` ends it. Nothing happens in a forward.

[Note: parameters without a gradient]
A rank whose hook never fires for some parameter cannot know whether another rank
used it. So `wait` sends what is left, with zeros for what is missing, and the last
bucket of each step carries two flags per parameter: "has a gradient here" and "trains
(or is frozen) as planned here". A rank that contributed zeros reads them: where some
rank used the parameter, the average becomes its `.grad`; where none did, `.grad` stays
as it is everywhere, so that momentum and decay leave it alone. A rank that froze or
unfroze something reads them too: the plan changes when all ranks have changed, for the
step after. Only such ranks read, so the usual step has no host sync.
"""

from __future__ import annotations

import atexit
import contextlib
import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from overlaplab import step_members, streams
from overlaplab.techniques.arrivals import Arrivals, watcher_of
from overlaplab.techniques.buckets import MIB, BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.wire import AllReduce, own_group
from overlaplab.techniques.in_flight import InFlight, Payload, Wire, version_of
from overlaplab.techniques.model_facts import ModelFacts, ParameterInfo


class BucketedReducer:
    """Averages gradients over ranks, in buckets launched during the backward pass.

    Each bucket is one asynchronous, coalesced all-reduce on the gradients themselves:
    nothing is copied into a buffer. Buckets are launched in the plan's order, whatever
    order gradients arrive in, so ranks always meet in the same bucket. On NCCL the
    collectives run on a communicator of their own at high priority.

    At construction rank 0's parameters and buffers go to all ranks. One step is: any
    number of forwards, one backward, `wait()`, the optimizer; with more backwards, all
    but the last inside `no_sync()`. Until `wait()` the gradients belong to the reducer:
    no optimizer, clipping or zeroing before it. Gradients of `torch.autograd.grad`
    never reach a hook and are not averaged.

    After Li et al., PyTorch Distributed (VLDB 2020); without its flat buffers.

    Args:
        model: on the rank's device; rank 0's values are broadcast.
        bucket_mib: cap of a bucket, in MiB of gradients. None: 25, or a sixteenth of
            all gradients where that is more: a launch costs the CPU the same for any
            size, and a model of a gigabyte would make sixty.
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
        cap = 25.0 if bucket_mib is None else bucket_mib
        first = cap if first_bucket_mib is None else first_bucket_mib
        self._caps = [_cap("bucket_mib", cap), _cap("first_bucket_mib", first)]
        _check_settings(max_in_flight, reduce_dtype)
        group = process_group or own_group()
        self._facts = ModelFacts(model, group)
        for info in self._facts.parameters:
            if watcher_of(info) is not None:
                raise ValueError(
                    f"parameter {info.name} has a reducer already. Call its remove() "
                    "first."
                )
        self._facts.broadcast()
        if bucket_mib is None:
            sixteenth = self._facts.num_bytes // 16
            self._caps[0] = max(self._caps[0], sixteenth)
            if first_bucket_mib is None:
                self._caps[1] = self._caps[0]
        self._group = group
        self._wire: Wire = wire or AllReduce(group, reduce_dtype)
        self._in_flight = InFlight(self._wire, max_in_flight)
        self._arrivals = Arrivals(
            self._facts.parameters, self._backward_begins, self._full
        )
        self._provider = streams.provider()
        self._on_cuda = self._facts.parameters[0].parameter.is_cuda
        self._num_steps = 0
        self._windows = 0  # of no_sync that are open
        self._removed = False
        self._number = _numbers[group] = _numbers.get(group, 0) + 1
        self._make_plan(self._facts.trainable())
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
        backward follows, `wait()` sends. Blocks nest; an exception leaves them.
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
        self._facts.broadcast(parameters=False)

    def abandon(self) -> None:
        """Give up the open step, after an error in it; zero the gradients then.

        Collective: every rank calls it, instead of `wait()`. Ranks that have sent
        fewer buckets than others send more, so that they meet again in the next step.
        """
        mine = len(self._in_flight)
        sent = _exchange(self._group, f"abandon {self._number}.{self._num_steps}", mine)
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
        now = self._facts.trainable()
        if now != self._planned:  # new dtypes count at once; freezing, see `_adopt`
            members = zip(self.parameters, self._planned, strict=True)
            self._make_plan([d and i.parameter.dtype for i, d in members])
        self._versions = [version_of(info.parameter) for info in self.parameters]

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
        for info, version in zip(self.parameters, self._versions, strict=True):
            if version_of(info.parameter) != version:
                raise RuntimeError(
                    f"parameter {info.name} was changed while step {self._num_steps} "
                    f"was open, before {what}: it was updated with a gradient that is "
                    "not averaged, and ranks differ from here on. Call reducer.wait() "
                    "between loss.backward() and optimizer.step()."
                )

    def _full(self, bucket: int) -> None:
        """Bucket `bucket`, and all before it, can go."""
        last = bucket == len(self.plan) - 1
        flags = self._flags if last else None
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

    def _flags(self, payload: Payload) -> Tensor:
        """1 for each gradient here, and 1 for each parameter that trains as planned."""
        like, number = payload.tensors[0], len(self.parameters)
        flags = torch.ones(2 * number, dtype=like.dtype, device=like.device)
        for each in (*self._in_flight.payloads, payload):
            for info, _ in each.absent:
                flags[info.index] = 0
        for info in self._changed():
            flags[number + info.index] = 0
        return flags

    def _changed(self) -> list[ParameterInfo]:
        """What was frozen or unfrozen here since the plan was made."""
        pairs = zip(self.parameters, self._planned, strict=True)
        return [i for i, dtype in pairs if i.parameter.requires_grad != bool(dtype)]

    def _adopt(self) -> None:
        """What the flags change here; see [Note: parameters without a gradient]."""
        payloads, changed = self._in_flight.payloads, self._changed()
        absent = [pair for payload in payloads for pair in payload.absent]
        if not absent and not changed:
            return
        flags = payloads[-1].tensors[-1]
        if is_fake(flags):
            return  # one rank stands for all: nobody else has what it misses
        values = flags.real.tolist()
        for info, average in absent:
            if values[info.index] > 0:
                info.parameter.grad = average.to(info.parameter.dtype)
        everywhere = [i for i in changed if values[len(self.parameters) + i.index] == 0]
        for info in changed:
            if info.parameter.requires_grad and info not in everywhere:
                raise RuntimeError(
                    f"parameter {info.name} trains on this rank and is frozen on "
                    "another one. Freeze and unfreeze on every rank alike."
                )
        planned = list(self._planned)
        for info in everywhere:
            trains = info.parameter.requires_grad
            planned[info.index] = info.parameter.dtype if trains else None
        if everywhere and any(planned):
            self._average_late([i for i in everywhere if i.parameter.requires_grad])
            self._make_plan(planned)

    def _average_late(self, unfrozen: list[ParameterInfo]) -> None:
        """Average what is not in this step's plan yet; all ranks have unfrozen it."""
        for info in unfrozen:
            self._in_flight.launch([info], (), self._presence)
        self._in_flight.finish()
        for payload in self._in_flight.payloads[len(self.plan) :]:
            for info, average in payload.absent:
                if payload.tensors[-1].real.item() > 0:
                    info.parameter.grad = average.to(info.parameter.dtype)

    @staticmethod
    def _presence(payload: Payload) -> Tensor:
        like = payload.tensors[0]
        return torch.full((1,), float(not payload.absent)).to(like)

    def _make_plan(self, planned: list[torch.dtype | None]) -> None:
        """Cut the parameters that have a dtype in `planned` into buckets."""
        self._planned = planned
        pairs = zip(self.parameters, planned, strict=True)
        members = [info for info, dtype in pairs if dtype is not None]
        named = [(info.name, info.parameter) for info in members]
        self.plan = plan_buckets(named, *self._caps)
        self._members = [
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


def _check_settings(max_in_flight: object, reduce_dtype: object) -> None:
    if max_in_flight is not None:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int):
            raise TypeError(f"max_in_flight is {max_in_flight!r}; expected an int")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; expected 1 or more")
    if reduce_dtype is not None:
        if not isinstance(reduce_dtype, torch.dtype):
            raise TypeError(
                f"reduce_dtype is {reduce_dtype!r}; expected a dtype, such as "
                "torch.float32"
            )
        if not reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype is {reduce_dtype}; expected a float dtype")


def _cap(name: str, mib: object) -> int:
    """A cap in bytes, at least 1."""
    if isinstance(mib, bool) or not isinstance(mib, int | float):
        raise TypeError(f"{name} is {mib!r}; expected a number of MiB")
    if not 0 < mib < math.inf:
        raise ValueError(f"{name} is {mib}; expected a finite number above 0 MiB")
    return max(1, int(mib * MIB))


# How many reducers each group has seen: equal on all ranks.
_numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def _exchange(group: dist.ProcessGroup, key: str, number: int) -> list[int]:
    """Every rank's number, through the store: collectives may be out of step."""
    store: Any = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group)
    keys = [f"overlaplab {group.group_name} {key} {rank}" for rank in ranks]
    store.set(keys[dist.get_rank(group)], str(number))
    store.wait(keys)
    return [int(store.get(key)) for key in keys]
