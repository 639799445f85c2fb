"""How often each byte of each parameter is updated, on which rank, by which optimizer.

An update is an operator that changes bytes of a parameter by what came from gradients,
whatever wrote it: torch's optimizers in all their forms, or `p -= lr * p.grad`. It is
found where the bytes are: in the parameter, or in what was copied from it (a shard, a
flat buffer, a master copy). What arrives from another rank, or is copied back from such
a place, is no update.

Not seen: new values that are made in a tensor of their own and leave by a collective
at once; gradients that come by a receive. A gradient and a weight in one allocation
are not told apart. NAdam adds in two parts, so it updates twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from overlaplab.grading.provenance import COPIES, JOINS, OVERWRITES, Ledger
from overlaplab.program import Access, Op, Program
from overlaplab.program.access import num_bytes
from overlaplab.timeline.intervals import Interval, merge, total

PARAMETER = "param "  # before the name of a parameter, for its bytes
_COPIES = COPIES | {"_to_copy", "clone", "contiguous", "to"}
_REDUCTIONS = {"all_reduce", "reduce_scatter", "reduce"}
# What an allocation that holds no parameter holds: made of gradients alone, or of
# gradients and weights, as `p - lr * p.grad` is.
_OTHER, _GRADIENTS, _WEIGHTS_TOO = range(3)


@dataclass(frozen=True, slots=True)
class UpdateEvidence:
    """What one rank did to one parameter in one step; zeros where it did nothing."""

    rank: int
    step: int  # counted from 1
    name: str  # the parameter's
    size: int  # its bytes, all of them
    bytes: int  # how many of them were updated here
    times: int  # updates of the byte that had the most


def find_updates(
    program: Program, marks: Sequence[Sequence[int]]
) -> tuple[UpdateEvidence, ...]:
    """By rank, step and parameter, for each that `reading.watch` named on that rank.

    Args:
        program: the record.
        marks: `[rank]`: index of the first operator of step 1, 2, ...
    """
    found = []
    for rank, ops in enumerate(program.ranks):
        named = [
            (n.name.removeprefix(PARAMETER), n.access, n.since)
            for n in program.names
            if n.rank == rank and n.name.startswith(PARAMETER)
        ]
        sizes = {s.storage: s.bytes for s in program.storages if s.rank == rank}
        weights, begin = _Weights(sizes), 0
        names = iter(sorted(enumerate(named), key=lambda item: item[1][2]))
        coming = next(names, None)
        for step, end in enumerate((*marks[rank], len(ops))):
            updated: dict[int, list[Interval]] = defaultdict(list)
            for op in ops[begin:end]:
                while coming is not None and coming[1][2] <= op.index:
                    weights.begin(coming[1][1], coming[0])
                    coming = next(names, None)
                for number, ranges in weights.step_of(op).items():
                    updated[number] += merge(ranges)
            begin = end
            found += [
                UpdateEvidence(rank, step, name, num_bytes(access), *_count(updated[i]))
                for i, (name, access, _) in enumerate(named)
                if step
            ]
    return tuple(found)


def _count(ranges: Iterable[Interval]) -> tuple[int, int]:
    """How many bytes are in any of `ranges`, and in how many of them at most one is."""
    ranges = list(ranges)
    changes = Counter(start for start, _ in ranges)
    changes.subtract(end for _, end in ranges)
    depths = accumulate(change for _, change in sorted(changes.items()))
    return total(merge(ranges)), max(depths, default=0)


class _Weights(Ledger):
    """Which bytes of one rank are a parameter's, moved on operator by operator.

    Args:
        sizes: bytes of each allocation.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()
        self._sizes = sizes
        self._homes: set[int] = set()  # allocations of the parameters themselves
        self._holds_what: dict[int, int] = {}  # ... of everything else

    def begin(self, access: Access, parameter: int) -> None:
        """From here on the bytes of `access` are that parameter."""
        self.name(access, parameter)
        self._homes.add(access.storage)

    def step_of(self, op: Op) -> dict[int, list[Interval]]:
        """Follow `op`; the bytes that it updates, by parameter."""
        found: dict[int, list[Interval]] = defaultdict(list)
        name = op.name.split(".")[0]
        for sources, target in _sources(op, name):
            what = max(map(self._what, sources), default=_OTHER)
            by_update = self._holds(target) and (
                what == _WEIGHTS_TOO
                or (what == _GRADIENTS and self._is_changed(op, target))
            )
            if by_update and op.collective is None:
                for _, mark in self._found(target):
                    found[mark.gradient].append((mark.low, mark.high))
            elif op.collective is not None:
                self._put(target, _received(op, what))
            elif name in _COPIES | JOINS:
                self._copy(sources, target, op.index, what)
            else:
                self._write(op, name, target, what)
        return found

    def _is_changed(self, op: Op, target: Access) -> bool:
        return target in op.reads or target.storage in self._homes

    def _copy(
        self, sources: Sequence[Access], target: Access, op: int, what: int
    ) -> None:
        if target.storage not in self._homes:
            if any(map(self._holds, sources)):
                self._join(sources, target, op)
            elif what:
                self._erase_all([target])
        self._put(target, what)

    def _write(self, op: Op, name: str, target: Access, what: int) -> None:
        in_place = target in op.reads and name not in OVERWRITES
        if not in_place and target.storage not in self._homes:
            self._erase_all([target])
        if op.phase == "backward":
            what = max(what, _GRADIENTS)
        elif what and any(map(self._holds, op.reads)):
            what = _WEIGHTS_TOO
        self._put(target, what)

    def _what(self, access: Access) -> int:
        if self._holds(access):  # a weight, whatever lay there before
            return _OTHER
        return self._holds_what.get(access.storage, _OTHER)

    def _put(self, target: Access, what: int) -> None:
        """`target` holds this now, unless it is a parameter's."""
        if self._holds(target):
            return
        if target.run_bytes < self._sizes.get(target.storage, 0):
            what = max(what, self._what(target))
        self._holds_what[target.storage] = what


def _sources(op: Op, name: str) -> list[tuple[Sequence[Access], Access]]:
    """What each thing that `op` writes is made of."""
    if op.collective is None and name in _COPIES:
        others = [read for read in op.reads if read not in op.writes]
        if len(others) == len(op.writes):
            return [([one], to) for one, to in zip(others, op.writes, strict=True)]
    return [(op.reads, target) for target in op.writes]


def _received(op: Op, what: int) -> int:
    """Sums of weights are none; weights that only move are another rank's work."""
    reduces = op.collective is not None and op.collective.operation in _REDUCTIONS
    return min(what, _GRADIENTS) if reduces or what == _GRADIENTS else _OTHER
