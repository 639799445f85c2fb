"""Uneven data: a rank without more batches takes part in the others' steps with zeros.

torch's `Join` asks before each step how many ranks go on; here is what a reducer adds
to the question and what an ended rank does meanwhile. Knows no data loader.

[Note: a step inside join]
A rank that goes on says so when its step opens, before its first bucket: it adds 1 to a
sum over all ranks. An ended rank adds 0, and if the sum is not 0, it runs the step as a
rank that had no backward: `wait` sends zeros and receives the averages. So both launch
the same collectives in the same order. A window of `no_sync` is one step, asked once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from overlaplab.techniques.data_parallel.base import StepwiseReducer
from overlaplab.techniques.groups import asked_group
from overlaplab.techniques.payload import Wire

Update = Callable[[], object]
_joining: WeakSet[dist.ProcessGroup] = WeakSet()  # groups inside a `join`


class JoinableReducer(StepwiseReducer, Joinable):
    """The part of `BucketedReducer` that is `join`; a member of torch's `Join` as well.

    Inside a join the wire of each step is another one.
    """

    _ending: _Ending | None = None  # set inside a join

    @contextlib.contextmanager
    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        update: Update | None = None,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """In this block ranks may have different numbers of batches, even none.

        A rank that comes to its end takes part in the others' steps, with zero
        gradients, until all have come there. Then every rank gets the parameters and
        buffers of one that ended last. Put the whole loop inside and end each step with
        `wait()`, also a window of `no_sync()` that is cut short. Collective: every rank
        enters the block. `broadcast_buffers()` and `abandon()` are refused in it: after
        an error in a step the other ranks wait for this one until they time out. A
        model whose forward has collectives of its own needs
        `throw_on_early_termination`. Not for captured steps: a replay does not tell the
        others that its rank goes on.

        As DDP's `join`. torch's `Join([reducer, optimizer])` does the same for several
        members, e.g. with a `ZeroRedundancyOptimizer`, which finds the averages in
        `.grad` on ended ranks, too.

        Args:
            divide_by_initial_world_size: True: averages are over all ranks, so that
                each batch counts the same, however few ranks still have one. False:
                over the ranks that go on; costs one more small all-reduce a step.
            update: what a rank does after `wait()` in each step: clip, step the
                optimizer and the scheduler. Ended ranks do it as well, so that the
                optimizer's state stays equal on all. None: they do not, as in DDP; the
                state of an optimizer that has one (momentum, Adam) then differs between
                ranks, and so do the updates of the next epoch.
            enable: False: the block does nothing; for ranks with equally many batches.
            throw_on_early_termination: RuntimeError on every rank as soon as one has
                ended.

        Raises:
            RuntimeError: opened inside `no_sync()` or another join of the group; left
                while a step is open; the process group was destroyed.
            TypeError: `update` is no function.

        Example:
            with reducer.join():
                for batch in batches:
                    optimizer.zero_grad()
                    model(batch).backward()
                    reducer.wait()
                    optimizer.step()
        """
        if update is not None and not callable(update):
            raise TypeError(
                f"update is {update!r}; expected a function without arguments, such as "
                "optimizer.step, or None"
            )
        self._guard.refuse_destroyed_group()
        if enable and self.join_process_group in _joining:
            raise RuntimeError(
                "join() inside another reducer.join() of the group: an ended rank "
                "would not know whose step comes next. Join once, with one reducer on "
                "a module that has all the parameters."
            )
        if enable:
            _joining.add(self.join_process_group)
        try:
            with Join(
                [self],
                enable,
                throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
                update=update,
            ):
                yield
                if enable and self._steps.arrivals.is_open:
                    raise RuntimeError(
                        "reducer.join() was left while a step is open: other ranks "
                        "would wait for its buckets. Call reducer.wait() after the "
                        "last backward, also where a window of no_sync() is cut short."
                    )
        finally:
            self._leave_join()
            if enable:
                _joining.discard(self.join_process_group)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `Join` calls on an ended rank; arguments as those of `join`."""
        if self._steps.arrivals.windows:
            raise RuntimeError("join() inside no_sync(); open the join first")
        self._ending = _Ending(self, **kwargs)
        self._steps.wire_of_step = self._ending.wire_of_step
        return self._ending

    def broadcast_buffers(self) -> None:
        self._refuse_in_join("reducer.broadcast_buffers()")
        super().broadcast_buffers()

    def abandon(self) -> None:
        self._refuse_in_join("reducer.abandon()")
        super().abandon()

    @property
    def join_device(self) -> torch.device:
        """Where `Join` makes its own small tensors."""
        return self._facts.parameters[0].parameter.device

    @property
    def join_process_group(self) -> Any:
        """The group of `Join`'s collectives; all members of the join must have it."""
        return asked_group(self._group)

    def _refuse_in_join(self, what: str) -> None:
        if self._ending is not None and self._join_config.enable:
            raise RuntimeError(
                f"{what} inside join(): ranks that have ended would not take part. "
                "Leave the block first."
            )

    def _leave_join(self) -> None:
        self._ending = self._steps.wire_of_step = None
        self._join_config = self._join_config.construct_disabled_join_config()


@dataclass(frozen=True)
class _WireOfStep:
    """The wire of one step; see [Note: a step inside join].

    Args:
        wire: the reducer's.
        notice: the work that tells ended ranks of the step; None on an ended rank.
        num_active: how many ranks go on, float64 of shape (), valid after
            `count.wait()`; None if averages are over all ranks.
        count: the work that sums `num_active`.
        world_size: the number of all ranks.
    """

    wire: Wire
    notice: Any
    num_active: Tensor | None
    count: Any
    world_size: int

    def dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        return self.wire.dtype_of(gradient)

    def launch(self, tensors: list[Tensor]) -> Any:
        return self.wire.launch(tensors), tensors

    def finish(self, launched: Any) -> None:
        mine, tensors = launched
        if self.notice is not None:
            self.notice.wait()
        self.wire.finish(mine)
        if self.num_active is not None:
            self.count.wait()
            torch._foreach_mul_(tensors, self.world_size / self.num_active)


class _Ending(JoinHook):
    """What an ended rank does while others go on, and when all have ended."""

    def __init__(
        self,
        reducer: JoinableReducer,
        divide_by_initial_world_size: bool = True,
        update: Update | None = None,
        **_: Any,  # of other members of the join
    ) -> None:
        self._reducer = reducer
        self._parameters = [i.parameter for i in reducer._facts.parameters]
        self._by_initial = divide_by_initial_world_size
        self._update = update
        self._own_gradients: list[Tensor | None] | None = None  # of an ended rank

    def wire_of_step(self) -> Wire:
        """The wire of a step that opens here; launches the step's first collectives."""
        reducer, ended = self._reducer, self._own_gradients is not None
        if not reducer._join_config.enable:
            return reducer._wire
        if not reducer._join_config.is_first_joinable:
            raise RuntimeError(
                "the reducer is not the first in Join([...]): an ended rank would not "
                "know whose step comes next. Put it first, and only one: a reducer on "
                "a module that has all the parameters."
            )
        notice = None if ended else Join.notify_join_context(reducer)
        num_active = count = None
        if not self._by_initial:
            num_active = torch.full(
                (),
                0.0 if ended else 1.0,
                dtype=torch.float64,
                device=reducer.join_device,
            )
            count = dist.all_reduce(num_active, group=reducer._group, async_op=True)
        size = dist.get_world_size(reducer._group)
        return _WireOfStep(reducer._wire, notice, num_active, count, size)

    def main_hook(self) -> None:
        """Others have opened a step: take part in it."""
        if self._own_gradients is None:
            self._own_gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._reducer.wait()
        if self._update is not None:
            self._update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have ended: take the last one's values, and one's own `.grad` again."""
        reducer = self._reducer
        if self._own_gradients is not None:
            pairs = zip(self._parameters, self._own_gradients, strict=True)
            for parameter, gradient in pairs:
                parameter.grad = gradient
        mine = dist.get_rank(reducer._group) if is_last_joiner else -1
        last = torch.full((), mine, device=reducer.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=reducer._group)
        reducer._facts.broadcast(source=int(last.item()))
        reducer._leave_join()
