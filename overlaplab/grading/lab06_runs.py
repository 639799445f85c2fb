"""What the cells of lab 06 run: recorded steps, and steps written without running.

A recorded program is re-timed by `replay`, on any link and with any bucket size; only
another model or another number of tokens needs another program.
"""

from __future__ import annotations

from dataclasses import replace

from overlaplab.program import Op, Program

MIB = 2**20
STEP = "step"


def cut(program: Program, label: str = STEP) -> Program:
    """What each rank launched from its first operator labelled `label` on.

    The set-up of a run (making the model) is recorded like everything else; a lesson
    looks at the step that comes after it.

    Raises:
        ValueError: a rank has no operator with this label.
    """
    ranks = []
    firsts = []
    for ops in program.ranks:
        first = next((op.index for op in ops if op.label == label), None)
        if first is None:
            raise ValueError(
                f"no operator is labelled {label!r}; run the step inside "
                f"`with overlaplab.streams.annotate({label!r}):`"
            )
        firsts.append(first)
        ranks.append(tuple(_shifted(op, first) for op in ops[first:]))
    waits = tuple(
        replace(w, op=w.op - firsts[w.rank], before=w.before - firsts[w.rank])
        for w in program.waits
        if w.op >= firsts[w.rank]
    )
    return replace(program, ranks=tuple(ranks), waits=waits, storages=(), names=())


def _shifted(op: Op, first: int) -> Op:
    collective = op.collective
    if collective is not None:
        parts = tuple(
            replace(
                part,
                ready=None
                if part.ready is None or part.ready < first
                else part.ready - first,
            )
            for part in collective.parts
        )
        collective = replace(collective, parts=parts)
    return replace(
        op,
        index=op.index - first,
        after=tuple(i - first for i in op.after if i >= first),
        collective=collective,
    )
