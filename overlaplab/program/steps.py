"""The steps of a program: which operators are of which, and one of them alone.

A step is what a rank launched in a range that marks it (`annotate("step 3")`, or
`overlaplab.streams.step(3)`): its operators carry the number as attribute "step". What
comes before the first is construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlaplab.program.record import Op, PayloadTensor, Program


def step_starts(program: Program) -> tuple[tuple[int, ...], ...]:
    """`[rank]`: index of the first operator of each step, in the order of the steps."""
    return tuple(
        tuple(first for _, first in _first_operators(ops)) for ops in program.ranks
    )


def only_step(program: Program, step: int | None = None) -> Program:
    """What each rank launched in one step, as a program of its own.

    The construction of a model is recorded like everything else; a step's times are
    those of the step alone. A step ends where the next one begins. What its memory was
    called and when it was allocated stays behind: the result is for `resolve` and
    `replay`.

    Args:
        program: the record; not changed.
        step: its number; None: the last one.

    Raises:
        ValueError: some rank has no such step; the message has those that it has.
    """
    bounds = [_bounds(rank, ops, step) for rank, ops in enumerate(program.ranks)]
    ranks = tuple(
        tuple(_shifted(op, start) for op in ops[start:end])
        for ops, (start, end) in zip(program.ranks, bounds, strict=True)
    )
    waits = []
    for wait in program.waits:
        start, end = bounds[wait.rank]
        if start <= wait.op and wait.before <= end:
            moved = replace(wait, op=wait.op - start, before=wait.before - start)
            waits.append(moved)
    return replace(program, ranks=ranks, waits=tuple(waits), storages=(), names=())


def _first_operators(ops: Sequence[Op]) -> list[tuple[int, int]]:
    """(number, index of its first operator) of each step of one rank."""
    found: list[tuple[int, int]] = []
    for op in ops:
        step = op.attributes.get("step")
        if step is not None and (not found or found[-1][0] != step):
            found.append((step, op.index))
    return found


def _bounds(rank: int, ops: Sequence[Op], step: int | None) -> tuple[int, int]:
    found = _first_operators(ops)
    starts = [*(first for _, first in found), len(ops)]
    numbers = [number for number, _ in found]
    if not numbers or (step is not None and step not in numbers):
        which = "no step" if step is None else f"no step {step!r}"
        raise ValueError(
            f"rank {rank} has {which}; it has {numbers}. Run each step inside "
            '`with overlaplab.annotate("step 1"):`, with its own number'
        )
    at = len(numbers) - 1 if step is None else numbers.index(step)
    return starts[at], starts[at + 1]


def _shifted(op: Op, start: int) -> Op:
    """`op` in a program that begins with the old operator `start`."""
    collective = op.collective
    if collective is not None:
        payload = tuple(_shifted_tensor(one, start) for one in collective.payload)
        collective = replace(collective, payload=payload)
    after = tuple(index - start for index in op.after if index >= start)
    return replace(op, index=op.index - start, after=after, collective=collective)


def _shifted_tensor(tensor: PayloadTensor, start: int) -> PayloadTensor:
    ready = tensor.ready
    known = ready is not None and ready >= start
    return replace(tensor, ready=ready - start if known else None)  # type: ignore[operator]
