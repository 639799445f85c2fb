"""Where a result comes from: operators of the record, back to what was given.

A step that computes in numpy, in Python numbers or on the CPU is right and takes no
time on the virtual clock; on a GPU it would take more than any other. So its result
does not count.

`hold(step, ...)` runs on a rank of the virtual cluster in the place of `step(...)`;
`release(run)` gives the run back with the values as they were. `origin_law` then knows
where to begin and what to ask for. Records no operator and costs the step no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from overlaplab.grading import plain
from overlaplab.grading.violation import Violation, broken
from overlaplab.program import Access, Op, Program, TensorName
from overlaplab.program.access import byte_runs
from overlaplab.timeline.intervals import Interval, intersect, merge, subtract, total

if TYPE_CHECKING:
    from overlaplab.cluster.run import Run

# Names by which both ends of a step are noted.
GIVEN = "overlaplab given"
RETURNED = "overlaplab returned"
# Bytes that a step may bring from the host: a factor, a few sizes, an index or two.
CONSTANTS_BYTES = 64
_WENT = " went into "
# What the CPU may do to its own memory on the way: move it.
_MOVES = {"copy_", "_foreach_copy_", "clone", "_to_copy", "to", "cpu", "contiguous"}
_MOVES |= {"pin_memory", "cat", "stack", "split"}


@plain.record
@dataclass(frozen=True, slots=True)
class Held:
    """What one rank's step returned, and what was noted of it."""

    value: Any  # what the step returned
    notes: tuple[TensorName, ...]  # of `given` and `returned`


def hold(
    step: Callable[..., Any],
    *args: Any,
    results: Callable[[Any], Any] = lambda value: value,
) -> Held:
    """`step(*args)` on this rank, with both ends noted.

    Args:
        step: the learner's.
        args: tensors, modules, and whatever Python makes of them.
        results: what is graded, from what `step` returned.
    """
    before = given(args)
    value = results(step(*args))
    return Held(value, (*before, *returned(value)))


def given(values: Any) -> tuple[TensorName, ...]:
    """Notes: the tensors in `values` are there before the learner's code runs."""
    return _noted(GIVEN, values)


def returned(values: Any) -> tuple[TensorName, ...]:
    """Notes: what the tensors in `values` hold now is graded."""
    return _noted(RETURNED, values)


def release(run: Run) -> Run:
    """The run of functions that return `Held`, with what they held.

    The notes join the program's names. Findings are made already: no message of theirs
    speaks of them.
    """
    assert run.program is not None, "the virtual cluster records"
    notes = [note for held in run.values for note in held.notes]
    program = replace(run.program, names=(*run.program.names, *notes))
    return replace(run, values=tuple(v.value for v in run.values), program=program)


def _noted(name: str, values: Any) -> tuple[TensorName, ...]:
    from overlaplab.cluster.virtual.recorder import current_recorder

    recorder = current_recorder()
    if recorder is None:
        return ()
    found, _ = recorder.storages.accesses(_tensors(values), recorder.current().name)
    since = len(recorder.ops)
    return tuple(TensorName(recorder.rank, access, name, since) for access in found)


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.nn.Module):
            found += [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


# -- the law


def origin_law(program: Program, *, what: str = "the result") -> list[Violation]:
    """Every rank's returned bytes were written by recorded operators.

    Back from the result, operator by operator, stands what the step was given, never
    more than `CONSTANTS_BYTES` that came from the host's numbers at once, and nothing
    that the CPU computed.

    Args:
        program: of a run that `origins.release` gave back.
        what: is returned, for the message.
    """
    found = []
    for rank, ops in enumerate(program.ranks):
        reason = _first_fault(ops, [n for n in program.names if n.rank == rank])
        if reason:
            found.append(broken("origin", rank=rank, what=what, reason=reason))
    return found


def _first_fault(ops: Sequence[Op], names: Iterable[TensorName]) -> str:
    """What is wrong with the first graded bytes at the moment when they were noted."""
    notes: dict[int, list[TensorName]] = defaultdict(list)
    for name in names:
        if name.name in (GIVEN, RETURNED):
            notes[name.since].append(name)
    ledger = _Ledger()
    for index in range(len(ops) + 1):
        for note in notes.get(index, ()):
            if note.name == GIVEN:
                ledger.give(note.access)
            elif reason := ledger.fault(note.access):
                return reason
        if index < len(ops):
            ledger.step(ops[index])
    return ""


class _Ledger:
    """Which bytes of one rank are accounted for, moved on operator by operator."""

    def __init__(self) -> None:
        self._known: dict[int, list[Interval]] = defaultdict(list)
        # Bytes of a doubtful origin, with what is wrong with them.
        self._doubtful: dict[int, list[tuple[list[Interval], str]]] = {}

    def give(self, access: Access) -> None:
        """These bytes are the step's from the start."""
        self._write(access, "")

    def step(self, op: Op) -> None:
        """Account for what `op` writes."""
        if not op.writes:
            return
        name = op.name.split(".")[0]
        reads = _sent(op) if op.collective else op.reads
        reason = next(filter(None, map(self.fault, reads)), "")
        if not reason and op.kind == "host" and name not in _MOVES and _size(op.reads):
            reason = f"what {_described(op)} computed on the CPU"
        elif reason and _WENT not in reason:
            reason += _WENT + _described(op)
        for access in op.writes:
            self._write(access, reason)

    def fault(self, access: Access) -> str:
        """What is wrong with these bytes, "" if nothing."""
        wanted = _ranges(access)
        if total(wanted) <= CONSTANTS_BYTES and not self._touches(access, wanted):
            return ""
        for where, reason in self._doubtful.get(access.storage, ()):
            if intersect(where, wanted):
                return reason
        if not intersect(self._known[access.storage], wanted):
            return f"{total(wanted)} bytes that no operator of the record wrote"
        return ""

    def _touches(self, access: Access, wanted: Sequence[Interval]) -> bool:
        return bool(intersect(self._known[access.storage], wanted))

    def _write(self, access: Access, reason: str) -> None:
        written = _ranges(access)
        known = self._known[access.storage]
        if not (len(written) == 1 and written[0] in known):  # else written again
            self._known[access.storage] = merge([*known, *written])
        before = self._doubtful.get(access.storage, [])
        after = [(subtract(where, written), why) for where, why in before]
        if reason:
            after.append((written, reason))
        if before or reason:
            self._doubtful[access.storage] = [(w, why) for w, why in after if w]


def _ranges(access: Access) -> list[Interval]:
    runs = byte_runs(access)
    return merge(runs) if len(runs) > 1 else runs


def _sent(op: Op) -> tuple[Access, ...]:
    """What a collective reads on this rank: of some, only the root sends."""
    collective = op.collective
    assert collective is not None
    if collective.operation in ("broadcast", "scatter"):
        return op.reads if collective.root == op.rank else ()
    return op.reads


def _size(accesses: Sequence[Access]) -> bool:
    """Whether these are more than a constant."""
    sizes = (total(_ranges(access)) for access in accesses)
    return sum(sizes) > CONSTANTS_BYTES


def _described(op: Op) -> str:
    return f"{op.name} [{op.source}]" if op.source else op.name
