"""What all reducers share: a step's buckets are launched in order, then waited for.

A technique decides two things: the plan, and when a bucket is launched. Everything
else is here: that ranks agree, parameters that get no gradient, freezing, streams.

[Note: parameters without a gradient]
A rank whose hook never fires for some parameter cannot know whether another rank
used it. So `wait` launches what is left, with zeros for what is missing, and the last
bucket of each step carries one flag a parameter, "has a gradient here". After the
collective a rank that contributed zeros reads the averaged flags: above zero, some
rank used the parameter, and the average becomes its `.grad`; at zero, nobody did,
and `.grad` stays None everywhere, so that momentum and decay leave it alone. Only a
rank that misses a gradient reads them, so the usual step has no host sync.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from overlaplab import step_members, streams
from overlaplab.streams import stream_of
from overlaplab.techniques.data_parallel.arguments import (
    check_max_in_flight,
    check_model,
    check_reduce_dtype,
)
from overlaplab.techniques.data_parallel.averaging import AllReduce, InFlight
from overlaplab.techniques.data_parallel.buckets import BucketPlan
from overlaplab.techniques.data_parallel.parameters import (
    ModelParameters,
    ParameterInfo,
)


@dataclass(eq=False, slots=True)
class StepBucket:
    """A bucket of the plan during a step.

    Args:
        index: position in the plan.
        slots: its parameters.
        missing: how many of their gradients have not arrived in this step.
        writers: keys of the streams that wrote those that have, in order of arrival
            (a dict and not a set: a run must not depend on hashes).
    """

    index: int
    slots: tuple[ParameterInfo, ...]
    missing: int
    writers: dict[Hashable, None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Launched:
    """A bucket between launch and finish; holds its gradients until all waited.

    Args:
        flight: the collective and its tensors.
        key: of the stream of the launch, which owns the copies.
        writers: as in `StepBucket`. They own gradients: until they too have waited,
            the allocator may hand out that memory while the collective still uses it.
        finished: that stream has waited and written back.
    """

    flight: InFlight
    key: Hashable
    writers: dict[Hashable, None]
    finished: bool = False


class Reducer:
    """Averages the gradients of a model over ranks. Base of the techniques.

    At construction rank 0's parameters and buffers go to all ranks. One step is: any
    number of forwards, one backward, `wait()`, the optimizer. Buffers are never
    written after construction, so two forwards may share a backward. Gradients of
    `torch.autograd.grad` never reach a hook and are not averaged.

    Raises:
        ValueError: nothing to train, sparse or lazy parameters, no process group, a
            parameter that has a reducer already.
        MismatchError: the ranks' models differ.

    Attributes:
        plan: what travels together, of the parameters that train now.
    """

    plan: BucketPlan

    def __init__(
        self,
        model: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        max_in_flight: int | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        check_model(model)
        check_max_in_flight(max_in_flight)
        check_reduce_dtype(reduce_dtype)
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed has no process group. Run the function with "
                "ol.run(...) or under torchrun, or call init_process_group first."
            )
        self._provider = streams.provider()
        self._stream_key = streams.key_reader(self._provider)
        group = process_group or _own_group()
        self._parameters = ModelParameters(model, group)
        self._refuse_second_reducer()
        self._parameters.broadcast()
        self._averager = AllReduce(group, reduce_dtype)
        self._on_cuda = self._parameters.slots[0].parameter.is_cuda
        self._max_in_flight = max_in_flight
        # Carries launches while they are capped: it waits for the oldest bucket, and
        # the compute stream goes on. Without it the cap would hold up the backward.
        self._side: Any = None
        self._side_key: Hashable = None
        if max_in_flight is not None:
            self._side = self._provider.make_stream(0)
            with self._provider.stream(self._side):
                self._side_key = self._stream_key()
        self._trainable: list[torch.dtype | None] = []
        self._step = 0
        self._open = False  # has a gradient of this step arrived?
        self._checked = False  # has a forward found the model as it was?
        self._buckets: list[StepBucket] = []
        self._launched: list[Launched] = []
        self._replan()
        self._before = model.register_forward_pre_hook(_BeforeForward(self))
        step_members.join(self)

    @property
    def num_steps(self) -> int:
        """Steps that `wait` has finished."""
        return self._step

    @property
    def slots(self) -> tuple[ParameterInfo, ...]:
        """The model's parameters, frozen ones included."""
        return self._parameters.slots

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of each parameter of the model, frozen ones included."""
        return [(slot.name, slot.parameter) for slot in self.slots]

    def wait(self) -> None:
        """Put the averaged gradients into `.grad`, safe to use on this stream.

        Launches what has not been (parameters without a gradient hold up their
        bucket until here) and makes the current stream wait for all of it. The CPU
        goes on, except with gloo, and where a rank must learn whether another one
        used a parameter that it did not. Collective: every rank calls it once after
        each backward, also a rank that had none.
        """
        if not self._checked:  # modules were called without the model's own forward
            self._parameters.check_identity()
        with torch.no_grad():
            if not self._open:
                self._open_step()
            while len(self._launched) < len(self._buckets):
                self._launch_next()
            key = self._stream_key()
            for launched in self._launched:
                self._finish_on(launched, key)
            self._adopt()
            self._close_step()

    def remove(self) -> None:
        """Take the hooks off the model. What was launched is waited for."""
        key = self._stream_key()
        with torch.no_grad():
            for launched in self._launched:
                self._finish_on(launched, key)
        self.abandon_step()
        self._before.remove()
        step_members.leave(self)
        for slot in self._parameters.slots:
            if slot.handle is not None:
                slot.handle.remove()
                slot.handle = None

    def abandon_step(self) -> None:
        """Forget a step that did not end, after an error in it; waits for nothing."""
        self._close_step()

    # What a technique decides.

    def _make_plan(self, parameters: list[tuple[str, Tensor]]) -> BucketPlan:
        raise NotImplementedError

    def _watch(self, slot: ParameterInfo) -> None:
        """Attach a hook to `slot`, if the technique has one."""

    # A step.

    def before_forward(self) -> None:
        """The model's forward begins: check it, and end a step that is open."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # evaluation, or a checkpoint's recomputation inside a backward
        self._parameters.check_identity()
        self._checked = True
        if self._open:  # a second backward would add to gradients that are in flight
            self.wait()

    def _open_step(self) -> None:
        """The first gradient of a step is here: has anything been frozen since?"""
        self._open = True
        if self._trainable != self._parameters.trainable():
            self._replan()

    def _refuse_second_reducer(self) -> None:
        """Two would average every gradient twice; with gloo both at once."""
        mine = {id(slot.parameter): slot.name for slot in self._parameters.slots}
        for other in step_members.members():
            for slot in other.slots if isinstance(other, Reducer) else ():
                if slot.handle is not None and id(slot.parameter) in mine:
                    raise ValueError(
                        f"parameter {mine[id(slot.parameter)]} has a "
                        f"{type(other).__name__} already. Call its remove() first."
                    )

    def _replan(self) -> None:
        self._trainable = self._parameters.trainable()
        slots = [s for s in self._parameters.slots if s.parameter.requires_grad]
        self.plan = self._make_plan([(s.name, s.parameter) for s in slots])
        for slot in self._parameters.slots:
            slot.bucket = None
        self._buckets = []
        for index, bucket in enumerate(self.plan):
            members = tuple(slots[position] for position in bucket.positions)
            step_bucket = StepBucket(index, members, len(members))
            self._buckets.append(step_bucket)
            for slot in members:
                slot.bucket = step_bucket
                if slot.handle is None:
                    self._watch(slot)

    def _launch_next(self) -> None:
        """Launch the first bucket that has not been: the same order on all ranks."""
        bucket = self._buckets[len(self._launched)]
        key = self._stream_key()
        if self._side is not None:
            bucket.writers[key] = None
            key = self._side_key
        for writer in bucket.writers:
            # Gradients come from the streams of their layers; the collective waits
            # only for the stream of its launch.
            if writer != key:
                stream_of(key).wait_stream(stream_of(writer))
        if self._side is None:
            flight = self._send(bucket)
        else:
            with self._provider.stream(self._side):
                self._hold_to_cap()
                flight = self._send(bucket)
        self._launched.append(Launched(flight, key, bucket.writers))

    def _send(self, bucket: StepBucket) -> InFlight:
        last = bucket.index == len(self._buckets) - 1
        launch = functools.partial(
            self._averager.launch,
            bucket.slots,
            num_flags=len(self._parameters.slots) if last else 0,
            unset=self._absent() if last else (),
            name_tensors=not self._on_cuda,
        )
        if self._on_cuda and not streams.ranges_are_wanted():
            return launch()
        with (
            self._provider.annotate(type(self).__name__),
            self._provider.annotate(f"bucket {bucket.index}"),
        ):
            return launch()

    def _hold_to_cap(self) -> None:
        """Let the side stream (the CPU, with gloo) wait for the oldest buckets."""
        assert self._max_in_flight is not None
        done = len(self._launched) - self._max_in_flight + 1
        for launched in self._launched[: max(done, 0)]:
            self._finish(launched)

    def _finish_on(self, launched: Launched, key: Hashable) -> None:
        """Let everyone who owns or will use the gradients wait for their average."""
        if launched.key == key:
            self._finish(launched)
        else:
            stream = stream_of(launched.key)
            with self._provider.stream(stream):
                self._finish(launched)
            self._provider.current_stream().wait_stream(stream)
        for writer in launched.writers:
            if writer != key and writer != launched.key:
                with self._provider.stream(stream_of(writer)):
                    launched.flight.work.wait()

    def _finish(self, launched: Launched) -> None:
        if not launched.finished:
            self._averager.finish(launched.flight)
            launched.finished = True

    def _absent(self) -> tuple[int, ...]:
        return tuple(
            slot.index
            for launched in self._launched
            for slot, _ in launched.flight.absent
        )

    def _adopt(self) -> None:
        """See [Note: parameters without a gradient]."""
        absent = [pair for done in self._launched for pair in done.flight.absent]
        if not absent:
            return
        flags = self._launched[-1].flight.flags
        assert flags is not None
        if is_fake(flags):
            return  # one rank stands for all: nobody else has what it misses
        used = flags.real.tolist()
        for slot, average in absent:
            if used[slot.index] > 0:
                slot.parameter.grad = average.to(slot.parameter.dtype)

    def _close_step(self) -> None:
        self._step += 1
        self._open = False
        self._checked = False
        self._launched = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
            bucket.writers = {}


class _BeforeForward:
    """The hook on the model's forward; a copy of the model gets none."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._reducer.before_forward()

    def __reduce__(self) -> tuple[Any, ...]:
        """For copy.deepcopy and pickles: a process group cannot go along."""
        return _no_hook, ()


def _no_hook() -> Any:
    return _do_nothing


def _do_nothing(module: nn.Module, args: Any) -> None:
    """A copy of a model that has a reducer has none."""


_own_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    WeakKeyDictionary()
)


def _own_group() -> dist.ProcessGroup:
    """The world; on NCCL a communicator of the reducers' own, at high priority.

    Without the priority the all-reduce's blocks wait behind those of large matmuls.
    One is shared by all reducers of a process: each would cost GPU memory.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend(world) != "nccl":
        return world
    if world not in _own_groups:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        _own_groups[world] = dist.new_group(pg_options=options)
    return _own_groups[world]
