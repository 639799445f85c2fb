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

import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.data_parallel.averaging import Averager, InFlight
from overlaplab.data_parallel.buckets import BucketPlan
from overlaplab.data_parallel.parameters import ModelParameters, Slot


@dataclass(eq=False, slots=True)
class StepBucket:
    """A bucket of the plan during a step.

    Args:
        index: position in the plan.
        slots: its parameters.
        missing: how many of their gradients have not arrived in this step.
        writers: the streams that wrote those that have, by `streams.stream_key`.
    """

    index: int
    slots: tuple[Slot, ...]
    missing: int
    writers: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Launched:
    """A bucket between launch and finish; holds its gradients until all waited.

    Args:
        flight: the collective and its tensors.
        stream: the stream of the launch, which owns the copies.
        key: of that stream.
        writers: as in `StepBucket`. They own gradients: until they too have waited,
            the allocator may hand out that memory while the collective still uses it.
        finished: `stream` has waited and written back.
    """

    flight: InFlight
    stream: Any
    key: Any
    writers: dict[Any, Any]
    finished: bool = False


class Reducer:
    """Averages the gradients of a model over ranks. Base of the techniques.

    At construction rank 0's parameters and buffers go to all ranks. One step is: any
    number of forwards, one backward, `wait()`, the optimizer. Buffers are never
    written after construction, so two forwards may share a backward. Gradients of
    `torch.autograd.grad` never reach a hook and are not averaged.

    Raises:
        ValueError: nothing to train, sparse or lazy parameters, no process group.
        MismatchError: the ranks' models differ.

    Attributes:
        plan: what travels together, of the parameters that train now.
    """

    plan: BucketPlan
    alive: ClassVar[WeakSet[Reducer]] = WeakSet()  # for those who capture a step

    def __init__(
        self,
        model: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        max_in_flight: int | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; expected 1 or more")
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype is {reduce_dtype}; expected a float dtype")
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed has no process group. Run the function with "
                "ol.run(...) or under torchrun, or call init_process_group first."
            )
        self._provider = streams.provider()
        self._stream_key = streams.key_reader(self._provider)
        group = process_group or _own_group()
        self._parameters = ModelParameters(model, group)
        self._parameters.broadcast()
        self._averager = Averager(group, reduce_dtype)
        self._on_cuda = self._parameters.slots[0].parameter.is_cuda
        self._max_in_flight = max_in_flight
        # Carries launches while they are capped: it waits for the oldest bucket, and
        # the compute stream goes on. Without it the cap would hold up the backward.
        self._side = self._provider.make_stream(0) if max_in_flight else None
        self._trainable: list[torch.dtype | None] = []
        self._step = 0
        self._open = False  # has a gradient of this step arrived?
        self._buckets: list[StepBucket] = []
        self._launched: list[Launched] = []
        self._replan()
        self._before = model.register_forward_pre_hook(self._before_forward)
        Reducer.alive.add(self)

    @property
    def num_steps(self) -> int:
        """Steps that `wait` has finished."""
        return self._step

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The model's parameters, frozen ones included."""
        return self._parameters.slots

    def wait(self) -> None:
        """Put the averaged gradients into `.grad`, safe to use on this stream.

        Launches what has not been (parameters without a gradient hold up their
        bucket until here) and makes the current stream wait for all of it. The CPU
        goes on, except with gloo, and where a rank must learn whether another one
        used a parameter that it did not. Collective: every rank calls it once after
        each backward, also a rank that had none.
        """
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
        Reducer.alive.discard(self)
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

    def _watch(self, slot: Slot) -> None:
        """Attach a hook to `slot`, if the technique has one."""

    # A step.

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # evaluation, or a checkpoint's recomputation inside a backward
        self._parameters.check_identity()
        if self._open:  # a second backward would add to gradients that are in flight
            self.wait()

    def _open_step(self) -> None:
        """The first gradient of a step is here: has anything been frozen since?"""
        self._open = True
        if self._trainable != self._parameters.trainable():
            self._replan()

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
        stream = self._provider.current_stream()
        key = self._stream_key()
        if self._side is not None:
            self._side.wait_stream(stream)
            bucket.writers.setdefault(key, stream)
            stream = key = self._side
        for writer_key, writer in bucket.writers.items():
            # Gradients come from the streams of their layers; the collective waits
            # only for the stream of its launch.
            if writer_key != key:
                stream.wait_stream(writer)
        with contextlib.ExitStack() as stack:
            if self._side is not None:
                stack.enter_context(self._provider.stream(self._side))
                self._hold_to_cap()
            named = not self._on_cuda
            if named or torch._C._autograd._profiler_enabled():
                stack.enter_context(self._provider.annotate(f"bucket {bucket.index}"))
            last = bucket.index == len(self._buckets) - 1
            flight = self._averager.launch(
                bucket.slots,
                num_flags=len(self._parameters.slots) if last else 0,
                unset=self._absent() if last else (),
                name_tensors=named,
            )
        self._launched.append(Launched(flight, stream, key, bucket.writers))

    def _hold_to_cap(self) -> None:
        """Let the side stream (the CPU, with gloo) wait for the oldest buckets."""
        assert self._max_in_flight is not None
        done = len(self._launched) - self._max_in_flight + 1
        for launched in self._launched[: max(done, 0)]:
            if not launched.finished:
                self._averager.finish(launched.flight)
                launched.finished = True

    def _finish_on(self, launched: Launched, key: Any) -> None:
        """Let everyone who owns or will use the gradients wait for their average."""
        here = launched.key == key
        if not launched.finished:
            with contextlib.nullcontext() if here else self._on(launched.stream):
                self._averager.finish(launched.flight)
            launched.finished = True
        if not here:
            self._provider.current_stream().wait_stream(launched.stream)
        for writer_key, writer in launched.writers.items():
            if writer_key != key and writer_key != launched.key:
                with self._on(writer):
                    launched.flight.work.wait()

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self._provider.stream(stream)

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
        used = flags.real.tolist()
        for slot, average in absent:
            if used[slot.index] > 0:
                slot.parameter.grad = average.to(slot.parameter.dtype)

    def _close_step(self) -> None:
        self._step += 1
        self._open = False
        self._launched = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
            bucket.writers = {}


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
