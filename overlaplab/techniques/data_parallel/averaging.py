"""One bucket's journey: launch an all-reduce on its gradients, finish it.

The collective works on the gradients themselves. A copy is made only where one must
be: another dtype on the wire, a memory order that the other ranks do not share, or a
gradient that is not there. Knows neither hooks nor the order of buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.techniques.data_parallel.parameters import ParameterInfo
from overlaplab.torch_versions import averages


@dataclass(slots=True)
class InFlight:
    """An all-reduce that was launched, and all that must stay alive until it ended.

    Args:
        work: the collective's.
        sent: what travels.
        staged: (gradient, its copy on the wire).
        absent: (slot, zeros on the wire) of parameters without a gradient here.
        flags: 1 for each slot that has a gradient on this rank; on the wire with the
            step's last bucket, else None.
    """

    work: Any
    sent: list[Tensor]
    staged: list[tuple[ParameterInfo, Tensor, Tensor]] = field(default_factory=list)
    absent: list[tuple[ParameterInfo, Tensor]] = field(default_factory=list)
    flags: Tensor | None = None


class AllReduce:
    """Launches and finishes averages over one group.

    Args:
        group: the ranks.
        reduce_dtype: dtype on the wire; None keeps the gradients', and so do complex
            ones.
    """

    def __init__(
        self, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None
    ) -> None:
        self._group = group
        self._reduce_dtype = reduce_dtype
        self._size = dist.get_world_size(group)
        self._divide = not averages(group)
        self._options = dist.AllreduceCoalescedOptions()
        average, total = dist.ReduceOp.AVG, dist.ReduceOp.SUM
        self._options.reduceOp = dist.ReduceOp(total if self._divide else average)
        self._options.asyncOp = True

    def launch(
        self,
        slots: tuple[ParameterInfo, ...],
        *,
        num_flags: int = 0,
        unset: tuple[int, ...] = (),
        name_tensors: bool = False,
    ) -> InFlight:
        """Start to average the gradients of `slots`, of one dtype, on all ranks.

        The collective runs on the communicator's stream, behind what the current
        stream has been given; the gradients belong to it until `finish`.

        Args:
            slots: the bucket, in the plan's order.
            num_flags: on the last bucket of a step the number of all slots, else 0.
            unset: indices of slots before these that have no gradient here.
            name_tensors: give the gradients names for reports.

        Returns:
            What `finish` needs.
        """
        dtype = slots[0].parameter.dtype
        if self._reduce_dtype is not None and not dtype.is_complex:
            dtype = self._reduce_dtype
        sent: list[Tensor] = []
        flight = InFlight(None, sent)
        for slot in slots:
            grad = slot.parameter.grad
            if (
                grad is not None
                and grad.dtype is dtype
                and grad.layout is torch.strided
                and grad.stride() == slot.stride
                and not grad.requires_grad
            ):
                wire = grad
            else:
                wire = self._stage(flight, slot, grad, dtype)
            sent.append(wire if slot.in_rows else _as_memory(wire))
        if flight.staged:
            _, grads, copies = zip(*flight.staged, strict=True)
            torch._foreach_copy_(copies, [g.detach() for g in grads])
        if num_flags:
            flight.flags = torch.ones(num_flags, dtype=dtype, device=sent[0].device)
            for index in (*unset, *(slot.index for slot, _ in flight.absent)):
                flight.flags[index] = 0
            sent.append(flight.flags)
        if name_tensors:  # the flags get none: what has no name is no gradient
            for slot, tensor in zip(slots, sent, strict=False):
                streams.name_tensor(tensor, streams.GRADIENT + slot.name)
        numbers = [torch.view_as_real(t) for t in sent] if dtype.is_complex else sent
        flight.work = self._group.allreduce_coalesced(numbers, self._options)
        return flight

    def finish(self, flight: InFlight) -> None:
        """Make the current stream wait for it and write the averages back.

        Call it on the stream of the launch, which owns the copies. The CPU waits
        only where the group's works block it (gloo).
        """
        flight.work.wait()
        if self._divide:
            torch._foreach_div_(flight.sent, self._size)
        if flight.staged:
            self._write_back(flight)

    def _stage(
        self,
        flight: InFlight,
        slot: ParameterInfo,
        grad: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        parameter = slot.parameter
        if grad is None:
            zeros = torch.empty_strided(
                parameter.shape, slot.stride, dtype=dtype, device=parameter.device
            ).zero_()
            flight.absent.append((slot, zeros))
            return zeros
        if grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {slot.name} has layout {grad.layout}; reducers "
                "average dense gradients only. Use sparse=False in its module."
            )
        copy = torch.empty_strided(
            grad.shape, slot.stride, dtype=dtype, device=grad.device
        )
        flight.staged.append((slot, grad, copy))
        return copy

    def _write_back(self, flight: InFlight) -> None:
        plain = [(g.detach(), c) for _, g, c in flight.staged if not _overlaps(g)]
        if plain:
            grads, copies = zip(*plain, strict=True)
            torch._foreach_copy_(grads, copies)
        for slot, grad, copy in flight.staged:
            if _overlaps(grad):  # e.g. expanded: it cannot hold the average
                slot.parameter.grad = copy.to(grad.dtype)


def _as_memory(tensor: Tensor) -> Tensor:
    """The same bytes as one row: gloo (2.13) spoils a channels_last tensor alone."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements share memory: some dimension is walked without moving."""
    return any(
        size > 1 and step == 0
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
