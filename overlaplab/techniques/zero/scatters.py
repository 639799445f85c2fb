"""Gradients leave during the backward pass: two buffers in turn, reduce-scattered.

A full gradient lives from its hook to its copy into a buffer; a buffer from that copy
to the end of its reduce-scatter; this rank's part then stays until the optimizer. So at
most two rows of full gradients wait for the link, whatever the model's depth.

Knows neither hooks nor the order of units.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from overlaplab import streams
from overlaplab.streams import stream_of
from overlaplab.techniques.model_facts import ParameterInfo, as_real
from overlaplab.techniques.zero.ring import ShardedRow, ShardedUnit
from overlaplab.torch_versions import averages, reduce_scatter_single


class _Flight:
    """One reduce-scatter: its work, the row, and where this rank's part arrives."""

    def __init__(self, work: Any, row: ShardedRow, part: Tensor) -> None:
        self.work, self.row, self.part = work, row, part


class Scatters:
    """The reduce-scatters of a step.

    Args:
        units: all.
        group: the ranks.

    Attributes:
        present: indices of parameters that had a gradient here in this step.
        num_launched: reduce-scatters since `finish`.
    """

    def __init__(self, units: Sequence[ShardedUnit], group: dist.ProcessGroup) -> None:
        self._rows = [row for unit in units for row in unit.rows]
        self._group = group
        self._size = dist.get_world_size(group)
        self._divides = not averages(group)  # no AVG: a sum, divided here
        self._op = dist.ReduceOp.SUM if self._divides else dist.ReduceOp.AVG
        self._stream_key = streams.key_reader(streams.provider())
        self._flights: list[_Flight | None] = [None, None]
        self._turn = 0
        self._keys: dict[Hashable, None] = {}  # of the streams of launches
        self._filled: set[ShardedRow] = set()  # rows with a gradient of this step
        self.present: set[int] = set()
        self.num_launched = 0
        sizes = [r.row.partition.full_bytes for r in self._rows if r.row.trains]
        self._allocate(max(sizes, default=0))

    def _allocate(self, num_bytes: int) -> None:
        device = self._rows[0].shard.device
        self._buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        for number, buffer in enumerate(self._buffers):
            streams.name_tensor(buffer, f"gradient buffer {number}")
        self._views: dict[tuple[int, ShardedRow], tuple[Tensor, list[Tensor]]] = {}

    def launch(self, unit: ShardedUnit, writers: Iterable[Hashable]) -> None:
        """Send the gradients of `unit` that are there, zeros for the others.

        Takes them out of `.grad`: a next backward starts anew.

        Args:
            unit: of whose rows those that train now leave.
            writers: keys of the streams that wrote the gradients.
        """
        here = self._stream_key()
        self._keys[here] = None
        others = [stream_of(key) for key in writers if key != here]
        for other in others:
            stream_of(here).wait_stream(other)
        for row in unit.rows:
            if row.trains:
                self._send(row, unit.name)
        for other in others:  # it owns the memory that was copied from
            other.wait_stream(stream_of(here))

    def _send(self, row: ShardedRow, name: str) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        # The second fill of a buffer is ordered behind its first scatter.
        self._settle(turn)
        full = self._fill(turn, row)
        if full.dtype is torch.float16 and self._divides:  # its sum may be inf
            full.div_(self._size)
        part = self._part(row)
        with streams.annotate(f"scatter {name}"):
            work = reduce_scatter_single(
                as_real(part),
                as_real(full),
                op=self._op,
                group=self._group,
                async_op=True,
            )
        self._flights[turn] = _Flight(work, row, part)
        self.num_launched += 1

    def _fill(self, turn: int, row: ShardedRow) -> Tensor:
        """The row's gradients in buffer `turn`; `.grad` is None then."""
        if row.row.partition.full_bytes > len(self._buffers[turn]):  # was frozen
            self._settle(1 - turn)
            self._allocate(row.row.partition.full_bytes)
        if (turn, row) not in self._views:
            full = self._buffers[turn][: row.row.partition.full_bytes]
            full = full.view(row.row.dtype)
            self._views[turn, row] = full, row.views(full)
        full, views = self._views[turn, row]
        into, grads, missing = [], [], []
        for info, view in zip(row.row.parameters, views, strict=True):
            parameter = info.parameter
            if parameter.grad is None or not parameter.requires_grad:
                missing.append(view)
            elif parameter.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {info.name} has layout {parameter.grad.layout}; "
                    "only dense gradients are sharded. Use sparse=False in its module."
                )
            else:
                into.append(view)
                grads.append(parameter.grad.detach())
                self.present.add(info.index)
            parameter.grad = None
        if into:
            torch._foreach_copy_(into, grads)
        if missing:
            torch._foreach_zero_(missing)
        return full

    def _part(self, row: ShardedRow) -> Tensor:
        """Where this rank's part arrives: in `row.gradient`, or beside what it has."""
        if row.gradient is None:  # was frozen
            row.make_gradient()
        assert row.gradient is not None
        kept = [piece.grad for piece in row.pieces]
        if row not in self._filled:
            self._filled.add(row)
            if all(grad is None for grad in kept):
                return row.gradient
            # Not zeroed since the last step: adds up, as everywhere in torch.
            for grad, view in zip(kept, row.gradient_views, strict=True):
                if grad is None:
                    view.zero_()
                elif grad is not view:
                    view.copy_(grad)
        return torch.empty_like(row.gradient)

    def _settle(self, turn: int) -> None:
        """Let the current stream wait for the scatter out of buffer `turn`."""
        flight, self._flights[turn] = self._flights[turn], None
        if flight is None:
            return
        flight.work.wait()
        if self._divides and flight.part.dtype is not torch.float16:
            flight.part.div_(self._size)
        total = flight.row.gradient
        assert total is not None
        if flight.part is not total:
            total.add_(flight.part)

    def finish(self) -> None:
        """Let the current stream wait for all; `row.gradient` is complete then."""
        here = self._stream_key()
        for key in self._keys:
            if key != here:
                stream_of(here).wait_stream(stream_of(key))
        self._settle(self._turn)
        self._settle(1 - self._turn)

    def hand_over(self, parameters: Sequence[ParameterInfo]) -> None:
        """Set `.grad` of the pieces of what some rank had a gradient for. Collective.

        Only a rank that missed a gradient asks (a host sync) whether others had one.
        """
        present = set(self.present)
        like = self._rows[0].shard
        absent = [
            info.index
            for info in parameters
            if info.index not in present and info.parameter.requires_grad
        ]
        flags = torch.ones(len(parameters), dtype=torch.int32, device=like.device)
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
        for row in self._rows:
            if row in self._filled:
                infos = zip(
                    row.row.parameters, row.pieces, row.gradient_views, strict=True
                )
                for info, piece, view in infos:
                    if info.index in present:
                        piece.grad = view

    def clear(self) -> None:
        """A new step: nothing was sent."""
        self._flights = [None, None]
        self._keys.clear()
        self._filled.clear()
        self.present.clear()
        self.num_launched = 0
