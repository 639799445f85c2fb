"""Where the ranks of one communicator meet: arrival, comparison, arithmetic.

A launch deposits what it brings and goes on; the last rank to arrive computes and
fills everybody's outputs. Works on plain tensors: knows no threads, streams or modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from overlaplab.errors import MismatchError

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one rank brings to a collective.

    Args:
        rank: global rank.
        op: index of the operator in its program.
        operation, reduce_op, root: as in `Collective`.
        inputs: copies, owned by the meeting.
        outputs: the rank's own tensors, filled when all have arrived.
        splits: for all_to_all_single: elements of dimension 0 for each rank.
        label: innermost annotation at the launch.
    """

    rank: int
    op: int
    operation: str
    reduce_op: str
    root: int
    inputs: Tensors
    outputs: Tensors
    splits: tuple[int, ...] = ()
    label: str = ""


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective of one communicator.

    Args:
        group: the communicator's name.
        ranks: its global ranks, in group order.
        sequence: the how-manieth of the communicator.
    """

    group: str
    ranks: tuple[int, ...]
    sequence: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    complete: bool = False
    on_complete: list[Callable[[], None]] = field(default_factory=list)

    def arrive(self, arrival: Arrival) -> None:
        """Add a rank; the last one completes the meeting.

        Raises:
            MismatchError: it does not fit those that arrived before.
        """
        for other in self.arrivals.values():
            compare(self, other, arrival)
            break
        self.arrivals[arrival.rank] = arrival
        if len(self.arrivals) == len(self.ranks):
            self.finish([self.arrivals[rank] for rank in self.ranks])

    def finish(self, arrivals: Sequence[Arrival]) -> None:
        """Compute, fill the outputs and drop the copies."""
        compute(self, arrivals)
        self.complete = True
        self.arrivals.clear()
        for callback in self.on_complete:
            callback()
        self.on_complete.clear()


def compare(meeting: Meeting, first: Arrival, second: Arrival) -> None:
    """Refuse a pair of ranks that do not fit together."""
    if first.rank > second.rank:
        first, second = second, first
    differs: list[tuple[str, str, str]] = []

    def same(what: str, one: object, other: object) -> None:
        if one != other:
            differs.append((what, str(one), str(other)))

    if {first.operation, second.operation} == {"send", "recv"}:
        sender, receiver = _sender_first((first, second))
        same("shapes", _shapes(sender.inputs), _shapes(receiver.outputs))
        same("dtypes", _dtypes(sender.inputs), _dtypes(receiver.outputs))
    else:
        same("operation", first.operation, second.operation)
    if not differs and first.operation == second.operation:
        same("reduce op", first.reduce_op, second.reduce_op)
        same("root", first.root, second.root)
        _compare_tensors(first, second, same)
    if not differs:
        return
    lines = [f"ranks differ in {_number(meeting)}."]
    for what, one, other in differs:
        lines.append(f"  {what}: rank {first.rank} has {one},")
        lines.append(f"  {' ' * len(what)}  rank {second.rank} has {other}")
    for arrival in (first, second):
        if arrival.label:
            lines.append(f"  rank {arrival.rank} is in {arrival.label!r}")
    lines.append(
        "Every rank must launch the same collectives, in the same order, with the "
        "same shapes and dtypes."
    )
    raise MismatchError("\n".join(lines))


def _compare_tensors(
    first: Arrival, second: Arrival, same: Callable[[str, object, object], None]
) -> None:
    """Every rank brings the same shapes, except where only the root brings any."""
    one_in, other_in = first.inputs, second.inputs
    one_out, other_out = first.outputs, second.outputs
    operation = first.operation
    if operation in ("gather", "scatter", "reduce"):
        # The root's side has group-size tensors, the others' none: compare singles.
        if operation == "scatter":
            one_in, other_in = first.outputs[:1], second.outputs[:1]
        one_out = other_out = ()
    if operation == "all_to_all":
        return _compare_splits(first, second, same)
    same("number of tensors", len(one_in), len(other_in))
    same("shapes", _shapes(one_in), _shapes(other_in))
    same("dtypes", _dtypes(one_in), _dtypes(other_in))
    if operation in ("all_gather", "reduce_scatter"):
        same("output shapes", _shapes(one_out), _shapes(other_out))


def _compare_splits(
    first: Arrival, second: Arrival, same: Callable[[str, object, object], None]
) -> None:
    same(
        "dtypes",
        sorted(set(_dtypes(first.inputs))),
        sorted(set(_dtypes(second.inputs))),
    )


def _shapes(tensors: Tensors) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def _dtypes(tensors: Tensors) -> list[str]:
    return [str(t.dtype).removeprefix("torch.") for t in tensors]


def _number(meeting: Meeting) -> str:
    where = "" if meeting.group == "default" else f" of group {meeting.group!r}"
    return f"collective #{meeting.sequence}{where}"


def compute(meeting: Meeting, arrivals: Sequence[Arrival]) -> None:
    """The collective itself: from everybody's inputs to everybody's outputs."""
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
                    f"ranks differ in {_number(meeting)} (all_to_all): rank "
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
    sender, receiver = _sender_first(arrivals)
    _fill(receiver.outputs[0], sender.inputs[0])


def _sender_first(arrivals: Sequence[Arrival]) -> list[Arrival]:
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
    output.detach().copy_(value.view(output.shape))
