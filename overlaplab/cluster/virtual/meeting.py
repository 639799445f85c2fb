"""Where the ranks of one communicator meet: arrival and comparison.

A launch deposits what it brings and goes on; the last rank to arrive computes. Each
rank's outputs are filled when *it* has waited (`Recorder.meet`), so who reads too early
sees the old values, on every rank alike. Works on plain tensors: knows no threads,
streams or modes.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from overlaplab.cluster.virtual.arithmetic import Arrival, compute, fill, sender_first
from overlaplab.errors import MismatchError


class WeakTensor:
    """Shape, dtype and strides of a dense tensor, and its bytes while they live.

    A collective will fill its rank's outputs, but it is not what keeps them: on a GPU
    the memory is the allocator's again as soon as the user and the work let go, and the
    record says so.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        storage = tensor.untyped_storage()
        self._storage = weakref.ref(storage)
        self._end_bytes = storage.nbytes()

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def tensor(self) -> torch.Tensor:
        """The tensor, without its autograd history; another one where it is gone."""
        storage = self._storage()
        # Nobody can see what is written where it is gone or gave its memory back.
        if storage is None or storage.nbytes() < self._end_bytes:
            return torch.empty_strided(self.shape, self._stride, dtype=self.dtype)
        new = torch.empty(0, dtype=self.dtype)
        return new.set_(storage, self._offset, self.shape, self._stride)


Dense = Sequence[torch.Tensor | WeakTensor]


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective of one communicator."""

    group: str  # the communicator's name
    ranks: tuple[int, ...]  # its global ranks, in group order
    sequence: int  # zero-based index in the communicator
    expected: int  # how many of them are recorded, and arrive
    point_to_point: bool = False  # a message; `ranks` are who sends and who receives
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    complete: bool = False
    on_complete: list[Callable[[], None]] = field(default_factory=list)
    # by rank, what it has not been given yet
    results: defaultdict[int, list[tuple[WeakTensor, torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # why there are no results; every rank gets it, as on gloo, also where the rank that
    # came last has caught it
    error: Exception | None = None

    def title(self) -> str:
        """ "collective #3 of process group 'pipe'", "message #0 from rank 0 to rank 1".

        That of all ranks, 'default', is not named.
        """
        if self.point_to_point:
            source, target = self.ranks
            return f"message #{self.sequence} from rank {source} to rank {target}"
        where = "" if self.group == "default" else f" of process group {self.group!r}"
        return f"collective #{self.sequence}{where}"

    def arrive(self, arrival: Arrival) -> None:
        """Add a rank; the last one completes the meeting.

        Raises:
            MismatchError: it does not fit those that arrived before.
        """
        self._refuse_failed()
        try:
            for other in self.arrivals.values():
                compare(self, other, arrival)
                break
            weak: Any = tuple(WeakTensor(t) for t in arrival.outputs)
            self.arrivals[arrival.rank] = replace(arrival, outputs=weak)
            if len(self.arrivals) == self.expected:
                self._finish()
        except Exception as error:
            self.error = error
            self.complete = True
            raise

    def _finish(self) -> None:
        """Compute what everybody gets, and drop the copies."""
        came = [self.arrivals[rank] for rank in self.ranks if rank in self.arrivals]
        if not any(isinstance(t, WeakTensor) for one in came for t in one.inputs):
            brought = [
                replace(came[i % len(came)], rank=rank)
                for i, rank in enumerate(self.ranks)
            ]
            for who, place, value in compute(brought, self.title()):
                output: Any = who.outputs[place]
                self.results[who.rank].append((output, value))
        self.complete = True
        self.arrivals.clear()
        for callback in self.on_complete:
            callback()
        self.on_complete.clear()

    def give(self, rank: int) -> None:
        """Fill the outputs of `rank`; raise what kept the ranks from meeting."""
        self._refuse_failed()
        for output, value in self.results.pop(rank, ()):
            fill(output.tensor(), value)

    def _refuse_failed(self) -> None:
        if self.error is not None:
            raise copy.copy(self.error)  # each rank's has a traceback of its own

    @contextlib.contextmanager
    def lend(self, rank: int) -> Iterator[None]:
        """While open, the outputs of `rank` are filled."""
        results = [(o.tensor(), value) for o, value in self.results[rank]]
        before = [output.clone() for output, _ in results]
        for output, value in results:
            fill(output, value)
        yield
        for (output, _), value in zip(reversed(results), reversed(before), strict=True):
            fill(output, value)


class Meetings:
    """All meetings of a run, by communicator and sequence number. The first
    `num_representatives` ranks stand for all; None: all are recorded."""

    def __init__(self, num_representatives: int | None = None) -> None:
        self.num_representatives = num_representatives
        self.open: dict[tuple[str, int], Meeting] = {}
        self.recorded: dict[tuple[int, ...], int] = {}  # of thousands, counted once
        self.names: dict[tuple[int, str, tuple[int, ...]], str] = {}
        # Sends to others less receives from them, by group, distance and bytes.
        self.messages: Counter[tuple[str, int, int]] = Counter()

    def at(
        self,
        group: str,
        ranks: tuple[int, ...],
        sequence: int,
        point_to_point: bool = False,
    ) -> Meeting:
        """The meeting, made by the first rank that comes."""
        key = (group, sequence)
        meeting = self.open.get(key)
        if meeting is None:
            expected = self.num_recorded(ranks)
            meeting = Meeting(group, ranks, sequence, expected, point_to_point)
            self.open[key] = meeting
        return meeting

    def num_recorded(self, ranks: tuple[int, ...]) -> int:
        """How many of `ranks` there is a thread for."""
        most = self.num_representatives
        if most is None:
            return len(ranks)
        if ranks not in self.recorded:
            self.recorded[ranks] = sum(rank < most for rank in ranks)
        return self.recorded[ranks]

    def group_name(
        self, torch_name: str, description: str, ranks: tuple[int, ...], world: int
    ) -> str:
        """A communicator's name, the same on its ranks and unlike any other's."""
        if torch_name == "0":
            return "default" if world == 1 else f"default {world}"
        name = self.names.get((world, torch_name, ranks))
        if name is None:
            name = description or torch_name
            taken = set(self.names.values())
            if name in taken:
                name = f"{name} {list(ranks)}"
            if name in taken:
                name = f"{name} #{torch_name}"
            if name in taken:
                name = f"{name} of world {world}"
            self.names[world, torch_name, ranks] = name
        return name


def compare(meeting: Meeting, first: Arrival, second: Arrival) -> None:
    """Refuse a pair of ranks that do not fit together."""
    if first.rank > second.rank:
        first, second = second, first
    differs: list[tuple[str, str, str]] = []

    def same(what: str, one: object, other: object) -> None:
        if one != other:
            differs.append((what, str(one), str(other)))

    if {first.operation, second.operation} == {"send", "recv"}:
        sender, receiver = sender_first((first, second))
        same("tag", first.tag, second.tag)
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
    lines = [f"ranks differ in {meeting.title()}."]
    for what, one, other in differs:
        lines.append(f"  {what}: rank {first.rank} has {one},")
        lines.append(f"  {' ' * len(what)}  rank {second.rank} has {other}")
    for arrival in (first, second):
        if arrival.label:
            lines.append(f"  rank {arrival.rank} is in {arrival.label!r}")
    lines.append(_RULES[meeting.point_to_point])
    raise MismatchError("\n".join(lines))


_RULES = {
    False: "Every rank must launch the same collectives, in the same order, with the "
    "same shapes and dtypes.",
    True: "A receive meets the next send of its peer, whatever the tag: both must have "
    "the same shape, dtype and tag.",
}


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
        # Shapes may differ; they are compared pair by pair when all have come.
        one, other = set(_dtypes(one_in)), set(_dtypes(other_in))
        return same("dtypes", sorted(one), sorted(other))
    same("number of tensors", len(one_in), len(other_in))
    same("shapes", _shapes(one_in), _shapes(other_in))
    same("dtypes", _dtypes(one_in), _dtypes(other_in))
    if operation in ("all_reduce", "reduce", "broadcast"):
        # The wire knows no strides: element i of one block meets element i of another.
        same("strides", _strides(one_in), _strides(other_in))
    if operation in ("all_gather", "reduce_scatter"):
        same("output shapes", _shapes(one_out), _shapes(other_out))


def _shapes(tensors: Dense) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def _strides(tensors: Dense) -> list[tuple[int, ...]]:
    """Of the dimensions where they matter."""
    return [
        tuple(step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1)
        for t in tensors
    ]


def _dtypes(tensors: Dense) -> list[str]:
    return [str(t.dtype).removeprefix("torch.") for t in tensors]
