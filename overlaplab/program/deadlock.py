"""Deadlocks: which ranks wait for one another, and where their orders part.

Order only: no time is needed to find one, so no time-out is either.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, zip_longest

from overlaplab.errors import DeadlockError
from overlaplab.program.graph import (
    Graph,
    build_graph,
    describe,
    iter_collectives,
    list_ranks,
)
from overlaplab.program.record import Op, Program


def find_deadlock(
    program: Program, *, waiting: Mapping[int, int] | None = None
) -> DeadlockError | None:
    """The deadlock in which `program` ends, or None if everything can end.

    Args:
        program: of a whole run, or of one that stands: what was launched until now.
        waiting: for a run that stands, by rank the index of the collective in whose
            `wait()` its CPU is. Ranks that are not named have ended.

    Returns:
        The error, not raised. A collective that some rank never launched is no
        deadlock by itself, only where something waits for it.

    Raises:
        ProgramError: the program is not well-formed.
    """
    graph = build_graph(program)
    _, waits_for = graph.walk()
    waiting = waiting or {}
    for g, left in enumerate(waits_for):
        if left >= 0 and not graph.unmatched(g):
            return deadlock_error(graph, waits_for=waits_for, waiting=waiting)
    for rank, index in waiting.items():
        if waits_for[graph.base[rank] + index] >= 0:
            return deadlock_error(graph, waits_for=waits_for, waiting=waiting)
    return None


def deadlock_error(
    graph: Graph,
    *,
    time_ns: int | None = None,
    waits_for: list[int] | None = None,
    waiting: Mapping[int, int] | None = None,
) -> DeadlockError:
    """The error for a program that cannot move, with each rank's place in it."""
    if waits_for is None:
        _, waits_for = graph.walk()
    num_ranks = len(graph.program.ranks)
    blocked = [
        _blocking(graph, waits_for, rank, (waiting or {}).get(rank))
        for rank in range(num_ranks)
    ]
    differs, explanation = _circle_of_messages(graph, waits_for, blocked)
    if not explanation:
        differs, explanation = _first_difference(graph, blocked)
    when = "" if time_ns is None else f" at {time_ns / 1000:.2f} us"
    lines = [f"no rank can move{when}."]
    for rank in range(num_ranks):
        mark = "   <-- differs" if rank in differs else ""
        lines.append(
            f"  rank {rank} {_state(graph, waits_for, rank, blocked[rank])}{mark}"
        )
    lines += explanation
    return DeadlockError("\n".join(lines))


def _blocking(
    graph: Graph, waits_for: list[int], rank: int, waiting: int | None
) -> Op | None:
    """The collective that `rank` has started and that holds up the rest of it."""
    if waiting is not None:
        g = graph.base[rank] + waiting
    else:
        stuck = [g for g in graph.rank_ids(rank) if waits_for[g] > 0]
        spinning = [g for g in graph.rank_ids(rank) if waits_for[g] == 0]
        if not stuck and not spinning:
            return None
        # What the CPU stands at comes first: it holds up all that follows.
        hosts = [g for g in stuck if graph.ops[g].kind == "host_wait"]
        g = hosts[0] if hosts else (stuck or spinning)[0]
    while waits_for[g] > 0:
        deps = [*graph.deps[g], graph.last_host[g]]
        g = next(d for d in deps if d >= 0 and waits_for[d] >= 0)
    return graph.ops[g]


def _state(graph: Graph, waits_for: list[int], rank: int, op: Op | None) -> str:
    if op is not None:
        missing = _missing(graph, waits_for, op)
        absent = f" for {list_ranks(missing)}" if missing else ""
        where = f" [{op.source}]" if op.source else ""
        return f"waits in {describe(op)}{absent}{where}"
    launched = sum(1 for _ in iter_collectives(graph.program.ranks[rank]))
    return f"has ended, after {launched} collectives"


def _missing(graph: Graph, waits_for: list[int], op: Op) -> list[int]:
    """The ranks that have not come to the collective in which `op` takes part."""
    assert op.collective is not None
    meeting = graph.meetings[graph.meeting[graph.base[op.rank] + op.index]]
    came = {graph.ops[g].rank for g in meeting.members if waits_for[g] == 0}
    recorded = range(len(graph.program.ranks))
    return [r for r in op.collective.ranks if r in recorded and r not in came]


def _circle_of_messages(
    graph: Graph, waits_for: list[int], blocked: list[Op | None]
) -> tuple[set[int], list[str]]:
    """The circle of ranks that wait for one another, if all in sends and receives."""
    for start in range(len(blocked)):
        circle: list[Op] = []
        rank = start
        while (op := blocked[rank]) is not None and op not in circle:
            missing = _missing(graph, waits_for, op)
            if op.name not in _MESSAGES or not missing:
                break
            circle.append(op)
            rank = missing[0]
        if op is None or op not in circle:
            continue
        circle = circle[circle.index(op) :]
        steps = " -> ".join(map(_message, [*circle, circle[0]]))
        return set(), [
            f"They wait for one another in a circle: {steps}.",
            "Let some receive first (even ranks send first, odd ranks receive first), "
            "or hand sends and receives to one dist.batch_isend_irecv. Small messages "
            "are no exception.",
        ]
    return set(), []


_MESSAGES = ("send", "recv")


def _message(op: Op) -> str:
    """ "rank 0 (send to 1)"."""
    assert op.collective is not None
    peer = next((r for r in op.collective.ranks if r != op.rank), op.rank)
    return f"rank {op.rank} ({op.name} {'to' if op.name == 'send' else 'from'} {peer})"


def _first_difference(
    graph: Graph, blocked: list[Op | None]
) -> tuple[set[int], list[str]]:
    """The ranks whose order of launches differs from rank to rank, and how."""
    ranks = graph.program.ranks
    for one, other in combinations(range(len(ranks)), 2):
        if blocked[one] is None and blocked[other] is None:
            continue
        both = zip_longest(_shared(ranks[one], other), _shared(ranks[other], one))
        for place, (a, b) in enumerate(both):
            if a is None or b is None or _key(a) != _key(b):
                return {one, other}, [
                    f"Their orders part at collective {place} of those that both take "
                    "part in:",
                    f"  rank {one}: {_described(a)}",
                    f"  rank {other}: {_described(b)}",
                    _rule(a, b),
                ]
    return set(), [
        "Every two ranks agree on the order of what both take part in, so the circle "
        "goes over three ranks or more: give all ranks one order of communicators."
    ]


def _rule(*ops: Op | None) -> str:
    if all(op is None or op.name in _MESSAGES for op in ops):
        return "Every send needs a receive on its peer, and every receive a send."
    return "Every rank must launch collectives in the same order."


def _shared(ops: tuple[Op, ...], other: int) -> list[Op]:
    return [
        op
        for op in iter_collectives(ops)
        if op.collective is not None and other in op.collective.ranks
    ]


def _key(op: Op) -> tuple[str, int, str, int, str]:
    c = op.collective
    assert c is not None
    return c.group, c.sequence, c.operation, c.bytes, op.label


def _described(op: Op | None) -> str:
    if op is None:
        return "nothing, its program ends"
    where = f" [{op.source}]" if op.source else ""
    return describe(op) + where
