"""What to tell when a run does not end well: deadlock, failure, time-out."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from overlaplab.cluster.virtual.meeting import Meeting
from overlaplab.cluster.virtual.ranks import RankThread
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.cluster.virtual.source import is_user_code, user_line
from overlaplab.errors import DeadlockError, RankError, RunTimeoutError
from overlaplab.program.record import Op

_DIFFERS = "   <-- differs"


def deadlock(
    ranks: Sequence[RankThread], recorders: Sequence[Recorder]
) -> DeadlockError:
    """Name each rank, what it waits in, and the first place where orders differ."""
    lines = ["no rank can move."]
    waits: list[Op | None] = []
    for rank, recorder in zip(ranks, recorders, strict=True):
        meeting = rank.waits_for if not rank.finished else None
        waits.append(_op_of(recorder, meeting))
    kinds = {_what(op) for op in waits}
    for rank, op in zip(ranks, waits, strict=True):
        mark = _DIFFERS if len(kinds) > 1 else ""
        if rank.finished:
            lines.append(f"  rank {rank.rank} has finished{mark}")
        elif op is None:
            lines.append(f"  rank {rank.rank} waits{mark}")
        else:
            where = f" at {op.source}" if op.source else ""
            lines.append(f"  rank {rank.rank} waits in {_what(op)}{where}{mark}")
    difference = first_difference(recorders)
    if difference:
        lines.append(difference)
    lines.append("Every rank must launch collectives in the same order.")
    return DeadlockError("\n".join(lines))


def first_difference(recorders: Sequence[Recorder]) -> str:
    """The first place where the ranks' orders of launches differ, as one line."""
    orders = [
        [op for op in recorder.ops if op.collective is not None]
        for recorder in recorders
    ]
    for place in range(max(map(len, orders), default=0)):
        here = [order[place] if place < len(order) else None for order in orders]
        if len({_what(op) for op in here}) > 1:
            parts = [
                f"rank {recorder.rank} {'nothing' if op is None else _what(op)}"
                for recorder, op in zip(recorders, here, strict=True)
            ]
            return f"Orders differ first at launch {place}: {', '.join(parts)}."
    return ""


def failure(rank: int, error: BaseException) -> RankError:
    """The first cause, with the user's frames."""
    frames = traceback.extract_tb(error.__traceback__)
    codes = [f.f_code for f, _ in traceback.walk_tb(error.__traceback__)]
    users = [f for f, code in zip(frames, codes, strict=True) if is_user_code(code)]
    text = "".join(traceback.format_list(users))
    text += "".join(traceback.format_exception_only(error))
    where = ""
    if users:
        where = f" (line {users[-1].lineno} of {users[-1].name})"
    message = f"rank {rank} failed{where}: {type(error).__name__}: {error}"
    return RankError(message, rank=rank, remote_traceback=text)


def timed_out(ranks: Sequence[RankThread], timeout_s: float) -> RunTimeoutError:
    """Where each rank was when the time was over."""
    frames = sys._current_frames()
    lines = [f"the run passed its deadline of {timeout_s} s."]
    for rank in ranks:
        if rank.finished:
            where = "has finished"
        else:
            frame = frames.get(rank.thread.ident or -1)
            line = "" if frame is None else user_line(frame)
            where = f"was at {line}" if line else "was outside the user's code"
            if isinstance(rank.waits_for, Meeting):
                where += " (waiting for its turn)"
        lines.append(f"  rank {rank.rank} {where}")
    lines.append("Raise timeout_s if the work needs longer.")
    return RunTimeoutError("\n".join(lines))


def _op_of(recorder: Recorder, meeting: object) -> Op | None:
    if not isinstance(meeting, Meeting):
        return None
    arrival = meeting.arrivals.get(recorder.rank)
    return None if arrival is None else recorder.ops[arrival.op]


def _what(op: Op | None) -> str:
    """ "all_reduce #5 of group 'grads' (bucket 2)"."""
    if op is None or op.collective is None:
        return ""
    collective = op.collective
    text = f"{collective.operation} #{collective.sequence}"
    if collective.group != "default":
        text += f" of group {collective.group!r}"
    return f"{text} ({op.label})" if op.label else text
