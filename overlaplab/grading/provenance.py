"""Which gradient bytes lie where: follows copies through one rank's program.

Every named gradient marks its bytes. Copies, casts, concatenations and scalings carry
the marks on, anything else that writes erases them, and a collective turns them into
marks of *sent* bytes. Knows no times and no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from overlaplab.program import Access, Op
from overlaplab.program.access import byte_runs, num_bytes

# Operators that carry what they read to what they write, element by element.
COPIES = {"copy_", "copy", "_foreach_copy_", "_foreach_copy"}
JOINS = {"cat", "stack", "concat", "hstack"}
_MAPS = {
    "_to_copy",
    "clone",
    "contiguous",
    "to",
    "div",
    "mul",
    "neg",
    "constant_pad_nd",
    "index_select",
    "add",
    "add_",
    "_foreach_div",
    "_foreach_mul",
    "_foreach_add",
    "_foreach_add_",
}
# In place, and nothing is left of what was there; any other operator in place changes
# values (scales, clips, accumulates) and leaves bytes what they are.
OVERWRITES = {"zero_", "fill_", "uniform_", "normal_", "random_", "set_"}
# A collective that hands sent bytes back, after a reduce_scatter for example.
_RETURNS = {"all_gather", "broadcast", "gather", "scatter"}


class Mark(NamedTuple):  # made by the thousand
    """Bytes [start, end) of a storage hold bytes [low, high) of a gradient."""

    start: int
    end: int
    gradient: int  # the number that the caller gave to the gradient
    low: int
    high: int  # high - low is another length where a cast changed the width
    # operators that carried them here since they were written or sent
    via: tuple[int, ...] = ()
    sent: bool = False  # a collective has carried them

    def cut(self, start: int, end: int) -> Mark:
        """The part inside [start, end), which must meet this mark."""
        if start <= self.start and self.end <= end:
            return self
        start, end = max(start, self.start), min(end, self.end)
        width = self.end - self.start
        span = self.high - self.low
        low = self.low + (start - self.start) * span // width
        high = self.low + (end - self.start) * span // width
        return Mark(start, end, self.gradient, low, high, self.via, self.sent)


_START = attrgetter("start")


@dataclass(frozen=True, slots=True)
class Cargo:
    """What one collective carries, from `Ledger.send`."""

    fresh: tuple[Mark, ...]  # marks of gradients not sent before
    stale: tuple[Mark, ...]  # marks of bytes that were sent before
    bytes: int  # length of the input
    marked_bytes: int  # how many of them hold any gradient


class Ledger:
    """The marks of one rank, moved on operator by operator in program order.

    Args:
        parameters: storages that hold parameters; what an optimizer adds to them is
            no longer a gradient.
    """

    def __init__(self, parameters: Iterable[int] = ()) -> None:
        self._marks: dict[int, list[Mark]] = defaultdict(list)
        self._parameters = frozenset(parameters)

    def name(self, access: Access, gradient: int) -> None:
        """From here on the bytes of `access` are gradient number `gradient`."""
        position = 0
        for start, end in byte_runs(access):
            self._erase(access.storage, start, end)
            length = end - start
            mark = Mark(start, end, gradient, position, position + length)
            self._marks[access.storage].append(mark)
            position += length

    def step(self, op: Op) -> None:
        """Carry the marks through a compute or copy operator."""
        name = op.name.split(".")[0]
        reads = [r for r in op.reads if self._holds(r)]
        in_place = name.endswith("_") and all(self._holds(w) for w in op.writes)
        if not (reads or in_place):
            return self._erase_all(op.writes)
        if any(w.storage in self._parameters for w in op.writes):
            return self._erase_all(op.writes)
        sources = [r for r in op.reads if r not in op.writes]
        if name in COPIES:
            if len(sources) == len(op.writes):
                return self._carry(sources, op.writes, op.index)
        elif name in JOINS and len(op.writes) == 1:
            return self._join(sources, op.writes[0], op.index)
        elif in_place and name not in OVERWRITES:
            return self._carry(op.writes, op.writes, op.index)
        elif name in _MAPS:
            if len(reads) == len(op.writes):
                return self._carry(reads, op.writes, op.index)
            if len(op.reads) == len(op.writes):
                return self._carry(op.reads, op.writes, op.index)
        return self._erase_all(op.writes)

    def send(self, op: Op) -> Cargo:
        """What the collective `op` carries; its outputs then hold sent bytes."""
        found = [mark for access in op.reads for _, mark in self._found(access)]
        returns = op.collective is not None and op.collective.operation in _RETURNS
        fresh = tuple(mark for mark in found if not mark.sent)
        stale = () if returns else tuple(mark for mark in found if mark.sent)
        total = sum(num_bytes(access) for access in op.reads)
        cargo = Cargo(fresh, stale, total, sum(m.end - m.start for m in found))
        self._deliver(op)
        return cargo

    def _deliver(self, op: Op) -> None:
        """Mark a collective's outputs as sent, as exactly as its shapes allow."""
        sizes_in = sum(num_bytes(access) for access in op.reads)
        sizes_out = sum(num_bytes(access) for access in op.writes)
        if sizes_in == sizes_out:
            parts = self._parts(op.reads, sizes_in)
        else:
            # A shard of everything, or everything from shards: which bytes went where
            # is the peers' business; that they were sent is what counts.
            parts = self._parts(op.reads, sizes_out)
        self._erase_all(op.writes)
        self._lay(
            [(a, b, m._replace(via=(), sent=True)) for a, b, m in parts], op.writes
        )

    def _carry(
        self, sources: Sequence[Access], targets: Sequence[Access], op: int
    ) -> None:
        moved = []
        for source, target in zip(sources, targets, strict=True):
            parts = self._parts([source], num_bytes(target))
            moved.append((parts, target))
        for parts, target in moved:
            self._erase_all([target])
            self._lay(_through(parts, op), [target])

    def _join(self, sources: Sequence[Access], target: Access, op: int) -> None:
        parts = self._parts(sources, num_bytes(target))
        self._erase_all([target])
        self._lay(_through(parts, op), [target])

    def _parts(
        self, sources: Sequence[Access], target_bytes: int
    ) -> list[tuple[int, int, Mark]]:
        """(first, end, mark) of the marks of `sources`, in bytes of the target."""
        total = sum(num_bytes(source) for source in sources)
        if total == 0:
            return []
        parts = []
        base = 0
        for source in sources:
            for position, mark in self._found(source):
                first = (base + position) * target_bytes // total
                last = base + position + mark.end - mark.start
                parts.append((first, last * target_bytes // total, mark))
            base += num_bytes(source)
        return parts

    def _lay(
        self, parts: Sequence[tuple[int, int, Mark]], targets: Sequence[Access]
    ) -> None:
        """Put `parts`, counted along `targets` one after another, into storages."""
        base = 0
        for target in targets:
            marks = self._marks[target.storage]
            for start, end in byte_runs(target):
                shift = start - base
                for first, last, mark in parts:
                    if first >= last or last <= base or base + end - start <= first:
                        continue
                    _, _, gradient, low, high, via, sent = mark
                    whole = Mark(
                        first + shift, last + shift, gradient, low, high, via, sent
                    )
                    marks.append(whole.cut(start, end))
                base += end - start

    def _found(self, access: Access) -> Iterator[tuple[int, Mark]]:
        """(position along the access, mark cut to it), in order."""
        marks = self._marks.get(access.storage)
        if not marks:
            return
        position = 0
        for start, end in byte_runs(access):
            inside = [m.cut(start, end) for m in marks if m.start < end > start < m.end]
            inside.sort(key=_START)
            for mark in inside:
                yield position + mark.start - start, mark
            position += end - start

    def _holds(self, access: Access) -> bool:
        marks = self._marks.get(access.storage)
        if not marks:
            return False
        return any(
            m.start < end > start < m.end
            for start, end in byte_runs(access)
            for m in marks
        )

    def _erase_all(self, accesses: Sequence[Access]) -> None:
        for access in accesses:
            if self._marks.get(access.storage):
                for start, end in byte_runs(access):
                    self._erase(access.storage, start, end)

    def _erase(self, storage: int, start: int, end: int) -> None:
        kept: list[Mark] = []
        for mark in self._marks.get(storage, ()):
            if mark.end <= start or mark.start >= end:
                kept.append(mark)
                continue
            if mark.start < start:
                kept.append(mark.cut(mark.start, start))
            if mark.end > end:
                kept.append(mark.cut(end, mark.end))
        self._marks[storage] = kept


def _through(
    parts: Sequence[tuple[int, int, Mark]], op: int
) -> list[tuple[int, int, Mark]]:
    return [(a, b, mark._replace(via=(*mark.via, op))) for a, b, mark in parts]
