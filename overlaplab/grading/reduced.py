"""Gradients that were reduced on their way into `.grad`: inside a compiled graph, or in
the hook of a tensor.

Nobody could name such a gradient while it was the rank's own, so it is followed back
from `.grad`: through what hands its bytes on (copies, scalings, joins) and through
collectives, to the operator that computed it. No name is asked for that the code which
is judged could give. Knows no times and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlaplab.grading.provenance import COPIES, JOINS
from overlaplab.program import Access, Op
from overlaplab.program.access import byte_runs, num_bytes

# By storage, the operators that write it, in order.
Writes = Mapping[int, Sequence[int]]

_HANDS_ON = COPIES | {"_to_copy", "clone", "contiguous", "to"}
_HANDS_ON |= {"div", "mul", "_foreach_div", "_foreach_mul"}
_IN_PLACE = {"div_", "mul_", "_foreach_div_", "_foreach_mul_"}
_ADDS = {"add_", "_foreach_add_"}
_ZEROS = {"zero_", "_foreach_zero_"}


def before_reduction(
    ops: Sequence[Op], writes: Writes, access: Access, before: int
) -> tuple[int, Access] | None:
    """Which operator computed a gradient that was reduced, and where it left it.

    Args:
        ops: of one rank.
        writes: of the same rank, collectives included.
        access: the bytes of `.grad`.
        before: index of the operator that is next when `.grad` is there.

    Returns:
        None where no collective stands between the two.
    """
    crossed = False
    while (index := last_writer(ops, writes, access, before)) is not None:
        op = ops[index]
        source = _made_from(op, access)
        if source is None and op.name in _ADDS:
            source = _added_to_zeros(ops, writes, op, access)
        if source is None:
            return (index, access) if crossed and op.collective is None else None
        crossed |= op.collective is not None
        access, before = source, index
    return None


def last_writer(
    ops: Sequence[Op], writes: Writes, access: Access, before: int
) -> int | None:
    """The last operator before `before` that wrote any byte of `access`."""
    wanted = byte_runs(access)
    for index in reversed(writes.get(access.storage, ())):
        if index < before and any(
            low < end and start < high
            for write in ops[index].writes
            if write.storage == access.storage
            for low, high in byte_runs(write)
            for start, end in wanted
        ):
            return index
    return None


def _made_from(op: Op, access: Access) -> Access | None:
    """The bytes that `op` hands on to `access`; None where it computes them."""
    name = op.name.split(".")[0]
    if op.collective is not None:  # of the same bytes of all ranks, in their places
        same = sum(map(num_bytes, op.reads)) == sum(map(num_bytes, op.writes))
        return _at_same_place(op.reads, op.writes, access) if same else None
    if name in _IN_PLACE:
        return access
    sources = [read for read in op.reads if read not in op.writes]
    if name in JOINS:
        return _at_same_place(sources, op.writes, access)
    if name not in _HANDS_ON:
        return None
    if len(sources) > len(op.writes) == 1:  # a factor may be a tensor, too
        size = num_bytes(op.writes[0])
        sources = [read for read in sources if num_bytes(read) == size]
    if len(sources) != len(op.writes):
        return None
    for source, target in zip(sources, op.writes, strict=True):
        found = _at_same_place([source], [target], access)
        if found is not None:
            return found
    return None


def _added_to_zeros(
    ops: Sequence[Op], writes: Writes, op: Op, access: Access
) -> Access | None:
    """What autograd accumulates into a `.grad` that was zeroed in place."""
    zeroed = last_writer(ops, writes, access, op.index)
    others = [read for read in op.reads if read not in op.writes]
    if zeroed is None or ops[zeroed].name not in _ZEROS or len(others) != 1:
        return None
    return others[0] if num_bytes(others[0]) == num_bytes(access) else None


def _at_same_place(
    sources: Sequence[Access], targets: Sequence[Access], access: Access
) -> Access | None:
    """As `access` lies in `targets`, one after another, so the result in `sources`."""
    total, size = sum(map(num_bytes, targets)), num_bytes(access)
    scale = sum(map(num_bytes, sources)) / total if total else 0.0  # of a cast
    base = 0
    for target in targets:
        inside = _position(target, access)
        if inside is not None:
            low = round((base + inside) * scale)
            return _cut(sources, low, low + round(size * scale))
        base += num_bytes(target)
    return None


def _position(target: Access, access: Access) -> int | None:
    """How far behind the beginning of `target` the bytes of `access` begin."""
    if target == access:
        return 0
    there, here = byte_runs(target), byte_runs(access)
    if target.storage != access.storage or len(there) != 1 or len(here) != 1:
        return None
    (start, end), (low, high) = there[0], here[0]
    return low - start if start <= low and high <= end else None


def _cut(sources: Sequence[Access], low: int, high: int) -> Access | None:
    """Bytes [low, high) of `sources`, where they are in one of them."""
    base = 0
    for source in sources:
        size = num_bytes(source)
        if (low, high) == (base, base + size):
            return source
        if base <= low and high <= base + size:
            runs = byte_runs(source)
            start = runs[0][0] + low - base
            return Access(source.storage, start, high - low) if len(runs) == 1 else None
        base += size
    return None
