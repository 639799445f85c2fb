"""What each allocation is for, as far as a record shows it.

The recorder knows the parameters of modules, what is local of sharded ones, gradients,
and what optimizers keep (`StorageLife.kind`). The rest follows from who wrote and read
an allocation:

- Parameters are *gathered* where an all-gather brought them, and shards are what it
  sent: parameters of an optimizer that no pass computes with. Copies and casts on the
  way count. Who fills an allocation first says what it is: a replica that all-gathers
  only keep up to date stays a parameter.
- Gradients are also what a reduce-scatter made of gradients.

Not known: the states of an optimizer that is no torch.optim.Optimizer. What a forward
pass makes with grad mode off is "other".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from overlaplab.program.record import Access, Op, Program

# The same values in another place or precision.
_COPIES = frozenset(
    """
    _chunk_cat _foreach_copy_ _to_copy all_gather_copy_in cat chunk_cat clone copy copy_
    resize_ split_with_sizes_copy stack
    """.split()  # noqa: SIM905 (wrapped)
)


@dataclass(slots=True)
class _Uses:
    """What the record shows of one allocation."""

    # what filled it first: "gather", "copy" (of parameters), "forward", "backward" or
    # "before" (outside the passes)
    first: str = ""
    # the parameters that came into it by copies and all-gathers
    origins: set[int] = field(default_factory=set)
    gathered: bool = False  # ... by an all-gather
    sent: bool = False  # an all-gather sends what came from it
    gradients: bool = False  # gradients came into it by copies
    scattered: bool = False  # ... or by a reduce-scatter
    sends: bool = False  # a collective reads or writes it
    # computes, forward: an operator of a pass, of a forward pass, reads it
    computes: bool = False
    forward: bool = False


def memory_kinds(program: Program, rank: int) -> Mapping[int, str]:
    """The kind of each allocation of `rank`, one of `MEMORY_KINDS`, by its number."""
    declared = {s.storage: s.kind for s in program.storages if s.rank == rank}
    uses = {storage: _Uses() for storage in declared}
    for storage, kind in declared.items():
        if kind in ("parameters", "shards"):
            uses[storage].origins.add(storage)
        uses[storage].gradients = kind == "gradients"
    for op in program.ranks[rank]:
        _note(op, uses)
    return {storage: _kind(declared[storage], use) for storage, use in uses.items()}


def _note(op: Op, uses: Mapping[int, _Uses]) -> None:
    read = _uses_of(op.reads, uses)
    written = _uses_of(op.writes, uses)
    if op.collective is not None:
        for use in (*read, *written):
            use.sends = True
        if op.collective.operation == "all_gather":
            origins = _origins(read)
            for origin in origins:
                uses[origin].sent = True
            if origins:
                _bring(written, origins)
        elif op.collective.operation == "reduce_scatter":
            for use in written:
                use.scattered |= any(one.gradients for one in read if one is not use)
    elif op.name in _COPIES and (origins := _origins(read)):
        if any(use.gathered for use in read):
            _bring(written, origins)
        for use in written:
            use.first = use.first or "copy"
            use.origins |= origins
    else:
        for use in read:
            use.computes |= op.phase != ""
            use.forward |= op.phase == "forward"
    if op.name in _COPIES and any(use.gradients for use in read):
        for use in written:
            use.gradients = True
    if read or op.phase:  # else a constant, which says nothing
        for use in written:
            use.first = use.first or op.phase or "before"


def _uses_of(accesses: tuple[Access, ...], uses: Mapping[int, _Uses]) -> list[_Uses]:
    if len(accesses) == 1:  # as of most operators
        use = uses.get(accesses[0].storage)
        return [] if use is None else [use]
    return [uses[s] for s in {access.storage for access in accesses} if s in uses]


def _origins(read: Iterable[_Uses]) -> set[int]:
    return set().union(*(use.origins for use in read))


def _bring(written: Iterable[_Uses], origins: set[int]) -> None:
    for use in written:
        use.first = use.first or "gather"
        use.gathered = True
        use.origins |= origins


def _kind(declared: str, use: _Uses) -> str:
    if declared == "parameters":
        if use.gathered and use.first in ("gather", "copy"):
            return "gathered"
        return "shards" if use.sent and not use.computes else declared
    if declared:
        return declared
    if use.gathered and (use.computes or not use.sends):
        return "gathered"
    if use.scattered:
        return "gradients"
    if use.sends and use.first != "forward":
        return "communication"
    if use.first in ("forward", "backward"):
        return "activations"
    return "inputs" if use.forward else "other"
