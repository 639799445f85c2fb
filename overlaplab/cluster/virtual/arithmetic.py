"""The collectives themselves: from everybody's inputs to everybody's outputs.

Works on plain tensors: knows no threads, streams or modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from overlaplab.errors import MismatchError

if TYPE_CHECKING:
    from overlaplab.cluster.virtual.meeting import Arrival, Meeting


def compute(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    """Fill every rank's outputs; `arrivals` are in group order."""
    operation = arrivals[0].operation
    fill = _OPERATIONS.get(operation)
    if fill is not None:
        fill(meeting, arrivals)


def _all_reduce(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    for i in range(len(arrivals[0].inputs)):
        total = reduce_tensors([a.inputs[i] for a in arrivals], arrivals[0].reduce_op)
        for arrival in arrivals:
            _fill(arrival.outputs[i], total)


def _reduce(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    root = _root(meeting, arrivals)
    for i, output in enumerate(root.outputs):
        inputs = [a.inputs[i] for a in arrivals]
        _fill(output, reduce_tensors(inputs, root.reduce_op))


def _broadcast(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    root = _root(meeting, arrivals)
    for arrival in arrivals:
        if arrival is not root:
            for output, value in zip(arrival.outputs, root.inputs, strict=True):
                _fill(output, value)


def _all_gather(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    """Outputs: for each input, group-size tensors in group order."""
    num_ranks = len(arrivals)
    for arrival in arrivals:
        for i in range(len(arrival.inputs)):
            for j, other in enumerate(arrivals):
                _fill(arrival.outputs[i * num_ranks + j], other.inputs[i])


def _reduce_scatter(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    """Inputs: for each output, group-size tensors in group order."""
    num_ranks = len(arrivals)
    for j, arrival in enumerate(arrivals):
        for i, output in enumerate(arrival.outputs):
            inputs = [a.inputs[i * num_ranks + j] for a in arrivals]
            _fill(output, reduce_tensors(inputs, arrival.reduce_op))


def _all_to_all(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    for j, arrival in enumerate(arrivals):
        for i, output in enumerate(arrival.outputs):
            value = arrivals[i].inputs[j]
            if value.numel() != output.numel():
                raise MismatchError(
                    f"ranks differ in {meeting.title()} (all_to_all): rank "
                    f"{arrivals[i].rank} sends {tuple(value.shape)} to rank "
                    f"{arrival.rank}, which expects {tuple(output.shape)}.\n"
                    "Input splits of the sender must equal output splits of the "
                    "receiver."
                )
            _fill(output, value)


def _gather(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    root = _root(meeting, arrivals)
    for output, arrival in zip(root.outputs, arrivals, strict=True):
        _fill(output, arrival.inputs[0])


def _scatter(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    root = _root(meeting, arrivals)
    for arrival, value in zip(arrivals, root.inputs, strict=True):
        _fill(arrival.outputs[0], value)


def _send(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    sender, receiver = sender_first(arrivals)
    _fill(receiver.outputs[0], sender.inputs[0])


def sender_first(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return sorted(arrivals, key=lambda a: a.operation == "recv")


_OPERATIONS: dict[str, Callable[[Meeting, Sequence[Arrival]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _send,
}


def reduce_tensors(tensors: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """Reduce in group order, in the tensors' dtype: the same bits on every rank."""
    total = tensors[0].clone()
    combine = _COMBINE[reduce_op]
    for tensor in tensors[1:]:
        combine(total, tensor)
    if reduce_op == "avg":
        total.div_(len(tensors))
    return total


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda total, t: total.add_(t),
    "avg": lambda total, t: total.add_(t),
    "product": lambda total, t: total.mul_(t),
    "min": lambda total, t: torch.minimum(total, t, out=total),
    "max": lambda total, t: torch.maximum(total, t, out=total),
    "band": lambda total, t: total.bitwise_and_(t),
    "bor": lambda total, t: total.bitwise_or_(t),
    "bxor": lambda total, t: total.bitwise_xor_(t),
}


def _root(meeting: Meeting, arrivals: Sequence[Arrival]) -> Arrival:
    return arrivals[meeting.ranks.index(arrivals[0].root)]


def _fill(output: torch.Tensor, value: torch.Tensor) -> None:
    """Write without a sign of it to autograd, as NCCL and gloo do.

    A rank that has waited may have saved the tensor for its backward already: it is
    filled when the last rank arrives, and that is later than the wait.
    """
    output = output.detach()
    if output.is_inference():  # has no version
        output.copy_(value.view(output.shape))
        return
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(output):
        output.copy_(value.view(output.shape))
