"""Gradients leave during the backward pass, by reduce-scatter, unit after unit.

[Note: when gradients leave]
A unit's gradients leave when its backward is over: when another unit begins to compute,
or the step ends. That follows from the order of uses, which ranks share, and not from
which gradients a rank has: what is missing is sent as zeros. A full gradient lives from
its unit's backward to its copy into the unit's slot, whose weights have served. This
rank's part is allocated then, and stays until the optimizer. If the next unit needs the
same slot at once, gradients leave from memory of their own.

Embeddings, which need no weights in the backward pass, and the rest are sent at the
step's end, and so is what no unit's turn has sent. Each backward of a step is sent by
itself, except inside `no_sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from overlaplab import streams
from overlaplab.streams import stream_of
from overlaplab.techniques.arrivals import Arrivals
from overlaplab.techniques.model_facts import ModelFacts, as_real
from overlaplab.techniques.zero.guards import refuse_no_weights
from overlaplab.techniques.zero.ring import Ring, ShardedRow, ShardedUnit
from overlaplab.techniques.zero.windows import Windows
from overlaplab.torch_versions import (
    averages,
    launch_reduce_scatter,
    reduce_scatter_options,
)


class _Flight(NamedTuple):
    """One reduce-scatter: out of `full`, which lives as long, into this rank's part."""

    work: Any
    row: ShardedRow
    part: Tensor
    full: Tensor


class Scatters:
    """The gradients of a step, and how they leave.

    Args:
        facts: of the model.
        units: all of it.
        ring: from whose slots gradients leave.
        group: the ranks.

    Attributes:
        num_steps: that have ended.
        num_launched: reduce-scatters of the open step.
        windows: where each unit's weights are used.
    """

    _leaving: ShardedUnit | None  # whose backward is, or was, the last one

    def __init__(
        self,
        facts: ModelFacts,
        units: Sequence[ShardedUnit],
        ring: Ring,
        group: dist.ProcessGroup,
    ) -> None:
        self._facts, self._ring, self._group = facts, ring, group
        self._order = sorted(reversed(units), key=lambda unit: unit.is_late)
        self._position = {unit: at for at, unit in enumerate(self._order)}
        self._size = dist.get_world_size(group)
        self._divides = not averages(group)  # no AVG: a sum, divided here
        self._options = reduce_scatter_options(
            dist.ReduceOp.SUM if self._divides else dist.ReduceOp.AVG
        )
        self._provider = streams.provider()
        self._stream_key = streams.key_reader(self._provider)
        self._arrivals = Arrivals(facts.parameters, self._backward_begins, self._full)
        self._arrivals.plan(
            [[info.index for info in unit.parameters] for unit in self._order]
        )
        self.pausing = self._arrivals.pausing  # no_sync
        self.windows = Windows()
        self.num_steps = -1
        self.close()

    # When.

    def forward_begins(self, in_step: bool) -> None:
        """Refuse a broken step; outside one, look again at what trains."""
        self.refuse_broken("this forward")
        if not in_step:
            self._arrivals.reset()

    def is_paused(self) -> bool:
        """Inside `no_sync`: what goes backward now does not leave."""
        return self._arrivals.paused

    def goes_backward(self, unit: ShardedUnit) -> None:
        """`unit` begins its backward, with its weights."""
        self._went_backward.add(unit)
        self._sent.discard(unit)
        self._leaving = None if self._arrivals.paused else unit

    def begins(self, unit: ShardedUnit | None) -> None:
        """`unit` begins to compute: send what is behind its backward."""
        left = self._leaving
        if left is not None and left is not unit:
            in_slot = unit is None or unit.slot != left.slot
            self._send(left, in_slot and self._ring.has(left))
            self._leaving = None

    def finish(self) -> None:
        """Send what has not been, and hand over this rank's part of the averages."""
        if self._arrivals.windows:
            raise RuntimeError("zero.wait() inside no_sync(); leave the block first")
        self.refuse_broken("zero.wait()")
        self.begins(None)
        for unit in self._order:
            if unit not in self._sent:
                self._send(unit, in_slot=True)
        self.settle()
        self._hand_over()

    def close(self) -> None:
        """A new step: nothing was sent."""
        self.num_steps += 1
        self._flights: list[_Flight] = []
        self._parts: dict[ShardedRow, Tensor] = {}  # what has been averaged
        self._sent: set[ShardedUnit] = set()
        self._went_backward: set[ShardedUnit] = set()
        self._leaving = None
        self._present: set[int] = set()  # parameters that had a gradient here
        self.num_launched = 0
        self._arrivals.reset()

    def remove(self) -> None:
        """Take the hooks off."""
        self._arrivals.hooks.remove()

    @property
    def is_open(self) -> bool:
        """Whether gradients have arrived that were not handed over."""
        return self._arrivals.is_open or bool(self._sent)

    def refuse_open(self, what: str) -> None:
        """Raise RuntimeError if gradients were not handed over."""
        if self.is_open:
            raise RuntimeError(
                f"{what} before zero.wait(): gradients are on their way, and the "
                f"shards have none yet. Call zero.wait() before {what}."
            )

    def refuse_broken(self, what: str) -> None:
        """Raise RuntimeError if a backward of the open step did not end."""
        if self._arrivals.is_open and self._arrivals.backwards.failed:
            raise RuntimeError(
                f"a backward of step {self.num_steps} raised before it ended: "
                f"{self.num_launched} reduce-scatters were sent, so {what} cannot go "
                "on. Call zero.abandon() on every rank."
            )

    def _backward_begins(self) -> None:
        """The first gradient of a backward is here."""
        self.windows.check_backward()
        if self._arrivals.is_open:
            self.refuse_broken("this backward")
            self._arrivals.reset()
        self._arrivals.is_open = True

    def _full(self, position: int) -> None:
        """All gradients of a unit are here, and of those before it in the order."""
        self._check_weights(self._order[position])

    def _check_weights(self, unit: ShardedUnit) -> None:
        if not unit.is_late and unit not in self._went_backward:
            for info in unit.parameters:
                refuse_no_weights(unit, info.parameter.grad)

    # How.

    def _send(self, unit: ShardedUnit, in_slot: bool) -> None:
        """Send the gradients of `unit` that are there, zeros for the others.

        Takes them out of `.grad`: a next backward starts anew.
        """
        self._check_weights(unit)
        self._sent.add(unit)
        rows = [row for row in unit.rows if row.trains]
        if not rows:
            return
        if not in_slot or any(row in self._parts for row in rows):
            self.settle()  # one row at most in memory of its own; parts add up in turn
        here = self._stream_key()
        writers = self._arrivals.writers(self._position[unit])
        others = [stream_of(key) for key in writers if key != here]
        for other in others:
            stream_of(here).wait_stream(other)
        if in_slot:
            self._ring.take(unit)
        works = [self._launch(unit, row, in_slot) for row in rows]
        if in_slot:
            self._ring.lend(unit, works)
        for other in others:  # it owns the memory that was copied from
            other.wait_stream(stream_of(here))

    def _launch(self, unit: ShardedUnit, row: ShardedRow, in_slot: bool) -> Any:
        full, views = row.leaving, row.leaving_views
        if not in_slot or full is None:
            full = torch.empty(
                row.row.partition.numel, dtype=row.row.dtype, device=row.shard.device
            )
            views = row.views(full)
        self._fill(row, views)
        if full.dtype is torch.float16 and self._divides:  # its sum may be inf
            full.div_(self._size)
        part = torch.empty_like(row.shard)
        self._provider.name_tensor(part, f"gradient shard of {unit.name}")
        with self._provider.annotate(f"scatter {unit.name}"):
            work = launch_reduce_scatter(
                self._group, as_real(part), as_real(full), self._options
            )
        self._flights.append(_Flight(work, row, part, full))
        self.num_launched += 1
        return work

    def _fill(self, row: ShardedRow, views: Sequence[Tensor]) -> None:
        """Copy the row's gradients into `views`; `.grad` is None then."""
        into, grads, missing = [], [], []
        for info, view in zip(row.row.parameters, views, strict=True):
            parameter = info.parameter
            grad, parameter.grad = parameter.grad, None
            if grad is None or not parameter.requires_grad:
                missing.append(view)
                continue
            if grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {info.name} has layout {grad.layout}; only "
                    "dense gradients are sharded. Use sparse=False in its module."
                )
            into.append(view)
            grads.append(grad.detach() if grad.requires_grad else grad)
            self._present.add(info.index)
        if into:
            torch._foreach_copy_(into, grads)
        if missing:
            torch._foreach_zero_(missing)

    def settle(self) -> None:
        """Let the current stream wait for all that was sent, and add up the parts."""
        for work, row, part, _ in self._flights:
            work.wait()
            if self._divides and part.dtype is not torch.float16:
                part.div_(self._size)
            if row in self._parts:
                self._parts[row].add_(part)
            else:
                self._parts[row] = part
        self._flights.clear()
        self._ring.settle()

    def _hand_over(self) -> None:
        """Give pieces their gradients, of what some rank had one for. Collective.

        Adds to what a piece has, if it was not zeroed, as everywhere in torch. A piece
        without an element gets none: an optimizer would spend time on it. Only a
        rank that missed a gradient asks (a host sync) whether others had one.
        """
        present, parameters = set(self._present), self._facts.parameters
        absent = [
            info.index
            for info in parameters
            if info.index not in present and info.parameter.requires_grad
        ]
        flags = torch.ones(
            len(parameters), dtype=torch.int32, device=parameters[0].parameter.device
        )
        for index in absent:
            flags[index] = 0
        with streams.annotate("who has gradients"):
            work = dist.all_reduce(
                flags, dist.ReduceOp.MAX, group=self._group, async_op=True
            )
            work.wait()
        if absent and not is_fake(flags):
            values = flags.tolist()
            present.update(index for index in absent if values[index])
        for row, part in self._parts.items():
            for info, piece, view in row.cut(part):
                if info.index not in present:
                    continue
                if piece.grad is None:
                    piece.grad = view
                else:
                    piece.grad.add_(view)
