"""What to report when a run does not end well: deadlock, failure, time-out."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from overlaplab.cluster.virtual.meeting import Meeting, Meetings
from overlaplab.cluster.virtual.rank_thread import RankThread
from overlaplab.cluster.virtual.ranks import Turns
from overlaplab.cluster.virtual.source import is_users, user_line
from overlaplab.cluster.virtual.world import KeyWait
from overlaplab.deadline import WALL_FACTOR, stack_of
from overlaplab.errors import (
    DeadlockError,
    MismatchError,
    RankError,
    RunTimeoutError,
    message_of,
    say_of_recompiles,
)
from overlaplab.program import Program, find_deadlock

_MOST_RANKS = 16  # that a message lists
_COMPILES = "/torch/_dynamo/convert_frame"  # on the stack of whoever compiles


def deadlock(ranks: Sequence[RankThread], program: Program) -> DeadlockError:
    """Name each rank, what it waits in, and the first place where orders differ: no
    thread can move, and `program` is what has been launched until now."""
    waiting = {}
    for rank in ranks:
        if isinstance(rank.waits_for, Meeting) and not rank.finished:
            arrival = rank.waits_for.arrivals[rank.rank]
            waiting[rank.rank] = arrival.op
    error = find_deadlock(program, waiting=waiting)
    others = [r for r in ranks if isinstance(r.waits_for, KeyWait | str)]
    others = [rank for rank in others if not rank.finished]
    if not others:
        assert error is not None, "no rank can move, and the record shows no reason"
        return error
    lines = ["no rank can move."]
    lines += [f"  {rank} {rank.waits_for}{_standing(rank)}" for rank in others]
    if any(isinstance(rank.waits_for, KeyWait) for rank in others):
        lines.append("No rank that could still set it is left.")
    else:
        lines.append("No thread that could still free them is left.")
    if error is not None:
        lines += ["Besides:", str(error)]
    return DeadlockError("\n".join(lines))


def _standing(rank: RankThread) -> str:
    frame = sys._current_frames().get(rank.thread.ident or -1)
    line = "" if frame is None else user_line(frame)
    return f" [{line}]" if line else ""


def failure(rank: int, error: BaseException) -> RankError:
    """The first cause, with the user's frames."""
    say_of_recompiles(error)
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_users(frame.filename)]
    text = "".join(traceback.format_list(users))
    text += "".join(traceback.format_exception_only(error))
    where = ""
    if users:
        where = f" (line {users[-1].lineno} of {users[-1].name})"
    what = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")
    message = f"rank {rank} failed{where}: {what}"
    return RankError(message, rank=rank, remote_traceback=text)


def _waits_for_its_turn(frame: FrameType | None) -> bool:
    """Whether a thread stands where it takes the turn, the first one too."""
    return frame is not None and frame.f_code in (
        Turns.run_rank.__code__,
        Turns._hand_over.__code__,
    )


def timed_out(turns: Turns, timeout_s: float) -> RunTimeoutError:
    """Where each rank was when the time was over."""
    ranks, frames = turns.threads, sys._current_frames()
    what = f"{timeout_s:g} s of CPU time"
    if turns.on_the_wall:
        what = f"{WALL_FACTOR * timeout_s:g} s, with CPU time left: it slept or waited"
    lines = [f"the run passed its deadline of {what}."]
    compiles = False
    for rank in ranks[:_MOST_RANKS]:
        if rank.finished:
            where = "has finished"
        else:
            frame = frames.get(rank.thread.ident or -1)
            line = "" if frame is None else user_line(frame)
            where = f"was at {line}" if line else "was outside the user's code"
            if any(_COMPILES in code.co_filename for code, _ in stack_of(frame)):
                where += " (torch.compile is compiling what it calls)"
                compiles = True
            elif isinstance(rank.waits_for, str):
                where += f" ({rank.waits_for})"
            elif isinstance(rank.waits_for, Meeting) or _waits_for_its_turn(frame):
                where += " (waiting for its turn)"
        lines.append(f"  {rank} {where}")
    if len(ranks) > _MOST_RANKS:
        lines.append(f"  and {len(ranks) - _MOST_RANKS} more ranks")
        lines.append("With fake=True one rank stands for all that do the same.")
    if compiles:
        lines.append(
            "Compiling takes seconds, once: what is compiled serves all ranks and "
            "later runs, unless they bring other shapes or another backend."
        )
    lines.append("Raise timeout_s if the work needs longer.")
    error = RunTimeoutError("\n".join(lines))
    error.on_the_wall = turns.on_the_wall
    return error


_DATA = "data is not allocated yet"  # torch's C++, of a fake tensor


# -- one rank that stands for all
#
# Rank 0 is recorded on fake tensors, which have shapes and no values, and every other
# rank is taken to do the same at the same time. That holds for data, tensor and sharded
# parallelism, over the world, groups and meshes: rank 0's groups stand for the others'
# like them. With fake=n the first n ranks are recorded, each for those n, 2 n and so on
# above it; they meet one another as ever. What depends on `get_rank()` is done as they
# do it; nothing can notice that the others would not. Messages with the others are
# noticed: where all do the same, what one sends over some distance it also gets.


def explained(error: BaseException) -> BaseException:
    """`error`, or what it means where tensors have no values."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        what = f"{error.func} gives or needs a value (item, tolist, if tensor: ...)"
    elif isinstance(error, RuntimeError) and _DATA in str(error):
        what = "torch's C++ reads a tensor's memory here (DistributedDataParallel does)"
    else:
        return error
    new = RuntimeError(
        f"fake=True computes shapes and no values, and {what}. Leave it out of the "
        "fake run, or run with fake=False"
    )
    new.__cause__ = error
    return new.with_traceback(error.__traceback__)


def refuse_other_roles(meetings: Meetings) -> None:
    """Refuse messages that not every rank can send and receive alike.

    Raises:
        MismatchError: rank 0 sends what it does not receive, or the reverse.
    """
    for (group, distance, num_bytes), surplus in meetings.messages.items():
        if surplus:
            does, lacks = ("sends", "receives") if surplus > 0 else ("gets", "sends")
            raise MismatchError(
                f"fake=True lets rank 0 stand for all, but rank 0 {does} "
                f"{abs(surplus)} more than it {lacks} of the messages of {num_bytes} "
                f"bytes that go {distance} ranks up in group {group!r}: ranks have "
                "roles of their own. Pass their number, fake=4 for the four stages of "
                "a pipeline, if the first ranks are one of each; or fake=False, which "
                "records every rank"
            )
