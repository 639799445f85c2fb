"""What reducers share besides the course of a step: how they are built, and given up.

Knows neither when averages are waited for nor where they are left: that is what
reducers differ in.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from typing import NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from overlaplab import step_members
from overlaplab.techniques.buckets import BucketPlan, cap_bytes, default_cap_bytes
from overlaplab.techniques.data_parallel.guard import Guard
from overlaplab.techniques.data_parallel.options import CappedInFlight, checked_wire
from overlaplab.techniques.data_parallel.steps import Steps
from overlaplab.techniques.data_parallel.wire import AllReduce
from overlaplab.techniques.groups import checked_group, exchange, number_in, own_group
from overlaplab.techniques.hooks import is_watched
from overlaplab.techniques.in_flight import InFlight
from overlaplab.techniques.model_facts import ModelFacts, ParameterInfo
from overlaplab.techniques.payload import Wire


class StepwiseReducer:
    """The part of reducers that is not `wait`; arguments as theirs."""

    _guard_type: type[Guard] = Guard

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
        caps = {"bucket_mib": bucket_mib, "first_bucket_mib": first_bucket_mib}
        cap, first = (m if m is None else cap_bytes(n, m) for n, m in caps.items())
        group = own_group() if process_group is None else checked_group(process_group)
        self._group = group
        self._wire = (
            AllReduce(group, reduce_dtype)
            if wire is None
            else checked_wire(wire, reduce_dtype)
        )
        in_flight = InFlight(self._wire)
        if max_in_flight is not None:
            in_flight = CappedInFlight(self._wire, max_in_flight)
        self._facts = ModelFacts(model, group)
        for info in self._facts.parameters:
            if is_watched(info):
                raise ValueError(
                    f"parameter {info.name} has a reducer already. Call its remove() "
                    "first."
                )
        self._facts.broadcast()
        if cap is None:
            cap = default_cap_bytes(self._facts.num_bytes)
        self._guard = self._guard_type(self._facts, group)
        self._steps = Steps(
            self._facts,
            (cap, cap if first is None else first),
            in_flight,
            self._guard,
            title=type(self).__name__,
        )
        self._number = number_in(group)
        step_members.join(self)
        _reducers.add(self)

    @property
    def plan(self) -> BucketPlan:
        """What travels together, of the parameters that train."""
        return self._steps.agreement.plan

    @property
    def num_steps(self) -> int:
        """Steps that have ended, those that were given up included."""
        return self._steps.num_ended

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """The model's, frozen ones included."""
        return self._facts.parameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of each of `parameters`."""
        return [(info.name, info.parameter) for info in self.parameters]

    def wait(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block only accumulate; the next one after it sends.

        What counts is where the backward runs; the forward may be inside or outside. If
        no backward follows, `wait()` sends. Gradients add up in `.grad` itself, and
        each bucket is sent once. Blocks may be nested; an exception ends them, too.
        """
        with self._steps.arrivals.pausing():
            yield

    def broadcast_buffers(self) -> None:
        """Give the first rank's buffers (running means) to all. Collective; blocks.

        Raises:
            MismatchError: ranks have other buffers by now.
            RuntimeError: inside `join()`; the process group was destroyed.
        """
        self._guard.refuse_destroyed_group()
        self._facts.check_buffers()
        self._facts.broadcast(parameters=False)

    def abandon(self) -> None:
        """Give up the step after an error in it; zero the gradients afterwards.

        Collective: every rank calls it instead of `wait()`, also those without an
        error. Ranks that have sent fewer buckets than others send more, so that all
        meet again in the next step. The CPU waits until every rank has called it.

        Raises:
            RuntimeError: inside `join()` or a backward (in a hook), or after
                `remove()`; a rank does not come; the process group was destroyed, and
                ranks can meet no more.
        """
        self._guard.refuse_removed("reducer.abandon()")
        self._guard.refuse_inside_backward("reducer.abandon()", self._steps.arrivals)
        self._guard.refuse_destroyed_group()
        if not self._steps.arrivals.is_open:
            self._steps.open()  # it may have to send buckets of the others' plan
        if self._steps.in_flight.holds_up:
            # The others' backwards may wait for our buckets, and come here behind them.
            with torch.no_grad(), contextlib.suppress(Exception):
                self._steps.arrivals.announce(len(self._steps.arrivals.buckets))
        mine = self._steps.arrivals.next  # buckets that have been sent
        call = f"reducer.abandon() of step {self.num_steps}"
        if self._number > 1:
            call += f" of reducer {self._number}"
        sent = exchange(self._group, call, mine)
        with torch.no_grad():
            self._steps.arrivals.announce(max(sent))
            self._steps.in_flight.finish()
        self._steps.end()

    def remove(self) -> None:
        """Take the hooks off the model; gradients stay local from now on.

        Call it between steps, or on all ranks after the same bucket: it waits for those
        that were sent.
        """
        try:
            with torch.no_grad():
                self._steps.in_flight.finish()
        finally:
            self._steps.in_flight.clear()
            self._steps.arrivals.reset()
            self._steps.arrivals.hooks.remove()
            step_members.leave(self)
            self._guard.removed = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its hooks are on "
            "the parameters of one model, and its process group is this process's. "
            "Copy the model without it, and build another reducer on the copy."
        )

    def abandon_step(self) -> None:
        """Forget the open step on this rank alone; waits for nothing.

        For `ol.capture_step`, see `StepMember`; after an error in a usual step call
        `abandon`.
        """
        self._steps.end()


_reducers: WeakSet[StepwiseReducer] = WeakSet()


@atexit.register
def _let_go_of_groups() -> None:
    """A gloo group that is freed after the interpreter's end aborts (torch 2.13)."""
    for reducer in tuple(_reducers):
        vars(reducer).clear()
