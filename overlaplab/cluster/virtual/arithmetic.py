"""The collectives themselves: from everybody's inputs to what everybody's outputs get.

Works on plain tensors: knows no threads, streams or modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from overlaplab.errors import MismatchError

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one rank brings to a collective."""

    rank: int  # global rank
    op: int  # index of the operator in its program
    # operation, reduce_op, root: as in `Collective`
    operation: str
    reduce_op: str
    root: int
    inputs: Tensors  # copies, owned by the meeting
    outputs: Tensors  # the rank's own tensors; not kept alive until they are filled
    label: str = ""  # innermost annotation at the launch
    # of a send or receive: messages between two ranks stay in order, so a receive meets
    # the next send whatever its tag, and both must be equal
    tag: int = 0


def of_all_alike(arrival: Arrival, num_ranks: int) -> Iterator[torch.Tensor]:
    """What each output gets where every rank brings the same as `arrival`, of the root
    where there is one; none where nobody says."""
    if arrival.operation in ("all_gather", "gather"):
        for value in arrival.inputs:
            yield from [value] * num_ranks
    elif arrival.operation == "scatter":
        yield arrival.inputs[0]
    elif arrival.operation in ("all_reduce", "reduce"):
        for value in arrival.inputs:
            yield reduce_tensors([value] * num_ranks, arrival.reduce_op)


Arrivals = Sequence[Arrival]  # of all ranks, in group order
Results = Iterator[tuple[Arrival, int, torch.Tensor]]  # whose, which output, its value


def compute(arrivals: Arrivals, title: str) -> Results:
    """What every rank's outputs are to hold; writes nothing.

    Raises:
        MismatchError: two ranks' parts of an all_to_all differ; it calls the
            collective `title`.
    """
    operation = arrivals[0].operation
    if operation == "all_to_all":
        return _all_to_all(arrivals, title)
    if operation == "barrier":
        return iter(())
    return _OPERATIONS[operation](arrivals)


def _all_reduce(arrivals: Arrivals) -> Results:
    for i in range(len(arrivals[0].inputs)):
        total = reduce_tensors([a.inputs[i] for a in arrivals], arrivals[0].reduce_op)
        for arrival in arrivals:
            yield arrival, i, total


def _reduce(arrivals: Arrivals) -> Results:
    root = _root(arrivals)
    for i in range(len(root.outputs)):
        inputs = [a.inputs[i] for a in arrivals]
        yield root, i, reduce_tensors(inputs, root.reduce_op)


def _broadcast(arrivals: Arrivals) -> Results:
    root = _root(arrivals)
    for arrival in arrivals:
        if arrival is not root:
            for i, value in enumerate(root.inputs):
                yield arrival, i, value


def _all_gather(arrivals: Arrivals) -> Results:
    """Outputs: for each input, group-size tensors in group order."""
    num_ranks = len(arrivals)
    for arrival in arrivals:
        for i in range(len(arrival.inputs)):
            for j, other in enumerate(arrivals):
                yield arrival, i * num_ranks + j, other.inputs[i]


def _reduce_scatter(arrivals: Arrivals) -> Results:
    """Inputs: for each output, group-size tensors in group order."""
    num_ranks = len(arrivals)
    for j, arrival in enumerate(arrivals):
        for i in range(len(arrival.outputs)):
            inputs = [a.inputs[i * num_ranks + j] for a in arrivals]
            yield arrival, i, reduce_tensors(inputs, arrival.reduce_op)


def _all_to_all(arrivals: Arrivals, title: str) -> Results:
    for j, arrival in enumerate(arrivals):
        for i, output in enumerate(arrival.outputs):
            value = arrivals[i].inputs[j]
            if value.numel() != output.shape.numel():
                raise MismatchError(
                    f"ranks differ in {title} (all_to_all): rank "
                    f"{arrivals[i].rank} sends {tuple(value.shape)} to rank "
                    f"{arrival.rank}, which expects {tuple(output.shape)}.\n"
                    "Input splits of the sender must equal output splits of the "
                    "receiver."
                )
            yield arrival, i, value


def _gather(arrivals: Arrivals) -> Results:
    root = _root(arrivals)
    for i, arrival in enumerate(arrivals):
        yield root, i, arrival.inputs[0]


def _scatter(arrivals: Arrivals) -> Results:
    root = _root(arrivals)
    for arrival, value in zip(arrivals, root.inputs, strict=True):
        yield arrival, 0, value


def _send(arrivals: Arrivals) -> Results:
    sender, receiver = sender_first(arrivals)
    yield receiver, 0, sender.inputs[0]


def sender_first(arrivals: Arrivals) -> list[Arrival]:
    return sorted(arrivals, key=lambda a: a.operation == "recv")


_OPERATIONS: dict[str, Callable[[Arrivals], Results]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _send,
}


def reduce_tensors(tensors: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """Reduce in group order, in the tensors' dtype: the same bits on every rank.

    An average of halves is summed in float32: NCCL scales before it adds, so that
    two times 40000 in float16 is no infinity.
    """
    first = tensors[0]
    halves = first.dtype in (torch.float16, torch.bfloat16) and reduce_op == "avg"
    total = first.float() if halves else first.clone()
    combine = _COMBINE[reduce_op]
    for tensor in tensors[1:]:
        combine(total, tensor)
    if reduce_op == "avg":
        total.div_(len(tensors))
    return total.to(first.dtype)


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


def _root(arrivals: Arrivals) -> Arrival:
    return next(a for a in arrivals if a.rank == arrivals[0].root)


def fill(output: torch.Tensor, value: torch.Tensor) -> None:
    """Write without a sign of it to autograd, as NCCL and gloo do.

    A rank that has waited may have saved the tensor for its backward already: it is
    filled at the next operator that comes after the wait.
    """
    output = output.detach()
    if output.is_inference():  # has no version
        output.copy_(value.view(output.shape))
        return
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(output):
        output.copy_(value.view(output.shape))
