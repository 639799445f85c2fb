"""The course of a step, which reducers share: it opens, is sent in buckets, and ends.

A step *opens* with its first gradient, its buckets are *sent* one by one, and `wait`
ends it. Nothing happens in a forward. What breaks a step is refused here, on every
rank. Knows neither when averages are waited for nor where they are left: that is what
reducers differ in.
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
    Average,
    Flags,
    presence,
    present_elsewhere,
)
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


class StepwiseReducer:
    """The part of reducers that is the course of a step; arguments as theirs.

    Attributes:
        plan: what travels together, of the parameters that train.
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
        raise NotImplementedError

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

    def _backward_begins(self) -> None:
        """`Arrivals` has the first gradient of a backward, maybe not of the step."""
        if not self._arrivals.is_open:
            self._open()
            return
        self._refuse_failed_backward("this backward")
        if not self._arrivals.paused:  # else nothing is sent: `wait` will look
            self._refuse_changed_parameter("this backward")

    def _open(self) -> None:
        """A step begins: at its first gradient, else in `wait` or `abandon`."""
        self._refuse_destroyed_group()
        if self._facts.dtypes() != self._dtypes:  # after `model.to(dtype)`
            self._make_plan()
        self._marks = marks_of(self._facts.tensors)
        self._in_flight.wire = self._wire_of_step()
        self._arrivals.is_open = True

    def _wire_of_step(self) -> Wire:
        return self._wire  # another one inside `join`

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

    def _send_rest(self) -> None:
        """For `wait`: refuse a broken step, and send the buckets that are not full."""
        if self._arrivals.windows:
            raise RuntimeError("reducer.wait() inside no_sync(); leave the block first")
        self._refuse_removed("reducer.wait()")
        self._facts.check_identity()
        if self._arrivals.is_open:
            self._refuse_failed_backward("reducer.wait()")
            self._refuse_changed_parameter("reducer.wait()")
        with torch.no_grad():
            if not self._arrivals.is_open:
                self._open()
            self._arrivals.announce_rest()  # calls `_launch` for each
        if (info := self._in_flight.touched() or self._lost()) is not None:
            raise RuntimeError(
                f"{info.name}.grad was replaced, freed or written between the "
                "backward pass and reducer.wait(), while its average was on the "
                "way. Call reducer.wait() first; then clip, step or zero."
            )

    def _finish(self) -> list[Average]:
        """Wait for this step's buckets: then gradients that travelled are averages.

        Returns:
            Averages of what has no gradient here; nobody's `.grad` yet.
        """
        with torch.no_grad():
            self._in_flight.finish()
            return self._adopt()

    def _end_step(self) -> None:
        self._num_steps += 1
        self._in_flight.clear()
        self._arrivals.reset()

    # What breaks it.

    def _refuse_destroyed_group(self) -> None:
        if not is_registered(self._group):
            raise RuntimeError(
                "the reducer's process group has been destroyed since it was built "
                "(destroy_process_group). Call reducer.remove() and build a new one."
            )

    def _refuse_removed(self, what: str) -> None:
        if self._removed:
            raise RuntimeError(f"{what} after remove(); build a new reducer")

    def _refuse_failed_backward(self, what: str) -> None:
        """Raise if a backward of the open step did not end."""
        if self._arrivals.backward_failed:
            raise RuntimeError(
                f"a backward of step {self._num_steps} raised before it ended: "
                f"{len(self._in_flight)} of {len(self.plan)} buckets were sent, so "
                f"{what} cannot go on. Call reducer.abandon() on every rank instead "
                "of reducer.wait(), and zero the gradients."
            )

    def _refuse_changed_parameter(self, what: str) -> None:
        """Raise if a parameter was written since the step opened."""
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

    # What travels together.

    def _adopt(self) -> list[Average]:
        """Do what the flags say; see [Note: parameters without a gradient]."""
        found = self._flags.averages_elsewhere(self._in_flight.payloads)
        changed = self._flags.changed_everywhere(self._in_flight.payloads)
        if not changed or not self._flags.adopt(changed):
            return found
        # Those that train again are in no bucket of this step.
        if unfrozen := [info for info in changed if info.parameter.requires_grad]:
            self._provider.synchronize()  # no hook has noted which stream wrote them
            for info in unfrozen:
                self._in_flight.launch([info], (), presence)
            self._in_flight.finish()
        for payload in self._in_flight.payloads[len(self.plan) :]:
            found += present_elsewhere(payload)
        self._make_plan()
        return found

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


_reducers: WeakSet[StepwiseReducer] = WeakSet()


@atexit.register
def _let_go_of_groups() -> None:
    """A gloo group that is freed after the interpreter's end aborts (torch 2.13)."""
    for reducer in tuple(_reducers):
        vars(reducer).clear()
