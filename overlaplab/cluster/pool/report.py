"""What is said when a run on processes fails: which rank was where, and why.

Works on what collective logs and stack dumps say; knows no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from overlaplab.cluster.pool.collective_log import Launch, Notes
from overlaplab.cluster.pool.frames import Frame, format_frames
from overlaplab.cluster.pool.messages import Failure
from overlaplab.cluster.pool.pickling import loads
from overlaplab.errors import (
    MismatchError,
    RankError,
    RunTimeoutError,
    TimedOutDeadlockError,
    plural,
)
from overlaplab.program import Finding
from overlaplab.program.findings import of_reducers

_DIFFERS = "   <-- differs"


@dataclass(frozen=True, slots=True)
class State:
    """Where one rank was when its run was stopped."""

    notes: Notes  # of its collective log
    has_ended: bool = False  # its function had returned
    unfinished: tuple[Launch, ...] = ()  # collectives in flight that had not ended
    # innermost line of the user's code; None if nobody knows
    frame: Frame | None = None

    @property
    def waits_in(self) -> Launch | None:
        """The collective that blocks it: the CPU (gloo) or a stream (NCCL)."""
        if self.has_ended:
            return None
        return self.notes.waits_in or (self.unfinished[0] if self.unfinished else None)


def timeout_error(
    states: Mapping[int, State], backend: str, timeout_s: float
) -> RunTimeoutError:
    """The error for a run that passed its deadline."""
    if backend == "nccl":
        states = _with_what_streams_wait_for(states)
    differing = first_difference(states)
    shown = set()
    lines = []
    for rank, state in sorted(states.items()):
        waits_in = state.waits_in
        mark = ""
        if rank in differing and waits_in == differing[rank]:
            shown.add(rank)
            mark = _DIFFERS
        lines.append(f"  rank {rank} {_what(state)}{mark}")
        if state.frame is not None and not state.has_ended:
            lines.append(f"    at {state.frame}")
    if set(differing) - shown:
        lines.append("The ranks' collectives differ first here:")
        for rank, launch in sorted(differing.items()):
            text = "nothing more" if launch is None else _in_full(launch)
            lines.append(f"  rank {rank} launched {text}{_DIFFERS}")
    deadline = f"deadline of {timeout_s:g} s"
    if _is_deadlock(states):
        head = f"no rank can move: the run on {backend} was stopped at its {deadline}."
        lines.append(_repair(states))
        return TimedOutDeadlockError("\n".join([head, *lines]))
    head = f"the run on {backend} passed its {deadline} and was stopped."
    lines.append(
        "If it only needs longer, pass a larger timeout_s; a rank that ended or hangs "
        "elsewhere makes the others wait for ever."
    )
    return RunTimeoutError("\n".join([head, *lines]))


def rank_error(rank: int, failure: Failure, world_size: int) -> RankError | TypeError:
    """The error for a rank whose function raised."""
    what = f"{failure.type_name}: {failure.text}".removesuffix(": ")
    if failure.stage == "result":
        return TypeError(
            f"the result of rank {rank} cannot be sent back ({what}); return tensors "
            "or plain data"
        )
    traceback = format_frames(failure.frames)
    verb = "raised" if failure.stage == "function" else "could not start:"
    lines = [f"rank {rank} of {world_size} {verb} {what}"]
    lines += [traceback] if traceback else []
    error = RankError("\n".join(lines), rank=rank, remote_traceback=traceback)
    error.__cause__ = _original(failure)
    return error


def death_error(
    rank: int, world_size: int, how: str, log: str, notes: Notes
) -> RankError:
    """The error for a rank whose process ended without an answer."""
    lines = [f"rank {rank} of {world_size} died: its process {how}"]
    if notes.launches:
        lines.append(f"  the last collective that it launched: {notes.launches[-1]}")
    if log:
        lines.append("  it wrote:")
        lines += [f"    {line[:300]}" for line in log.splitlines()[:10]]
    return RankError("\n".join(lines), rank=rank)


def mismatch_error(
    states: Mapping[int, State], cause: Exception
) -> MismatchError | None:
    """The error for ranks that met in one collective with different ideas of it; None
    if the collective logs show no such meeting.

    Gloo kills the process, or raises, where the sizes of two ranks differ, and says
    neither which collective nor what the other rank did.
    """
    differing = first_difference(states)
    if not differing or None in differing.values():
        return None
    ranks = " and ".join(f"rank {rank}" for rank in sorted(differing))
    lines = [f"{ranks} met in one collective with different calls:"]
    for rank, launch in sorted(differing.items()):
        assert launch is not None
        lines.append(f"  rank {rank} launched {_in_full(launch)}{_DIFFERS}")
    lines.append(
        "Every rank must launch the same collectives in the same order, with tensors "
        "of equal shape and dtype."
    )
    error = MismatchError("\n".join(lines))
    error.__cause__ = cause
    return error


def unwaited_findings(unwaited: Mapping[int, Sequence[Launch]]) -> tuple[Finding, ...]:
    """One finding for each collective whose end nobody took care of."""
    return tuple(
        Finding(
            "unwaited",
            rank,
            f"rank {rank} never waited for {_in_full(launch)}: its result may be read "
            "too early. Keep the work that the launch returns and call its wait()"
            f"{of_reducers(launch.label)}.",
        )
        for rank, launches in sorted(unwaited.items())
        for launch in launches
    )


def first_difference(states: Mapping[int, State]) -> dict[int, Launch | None]:
    """The first place where two ranks' orders of launches differ, {} if they agree.

    Only collectives of groups that both belong to count. A rank that launched fewer
    differs only if it can launch no more: it has ended, or waits.
    """
    best: dict[int, Launch | None] = {}
    best_key: tuple[bool, int] | None = None
    for a, b in combinations(sorted(states), 2):
        for with_labels in (False, True):
            pair = _pair_difference(states, a, b, with_labels)
            if pair is None:
                continue
            numbers = [launch.number for launch in pair if launch is not None]
            key = (with_labels, min(numbers))
            if best_key is None or key < best_key:
                best_key, best = key, {a: pair[0], b: pair[1]}
            break
    return best


def _with_what_streams_wait_for(states: Mapping[int, State]) -> dict[int, State]:
    """NCCL lets the CPU go on: what blocks a rank is what a peer has not launched."""
    launched = {
        rank: {(launch.group, launch.sequence) for launch in state.notes.launches}
        for rank, state in states.items()
    }

    def unmatched(state: State) -> tuple[Launch, ...]:
        return tuple(
            launch
            for launch in state.notes.launches
            if not launch.is_point_to_point
            and not all(
                (launch.group, launch.sequence) in launched[rank]
                for rank in launch.ranks
            )
        )

    return {
        rank: state
        if state.has_ended or state.waits_in
        else replace(state, unfinished=unmatched(state))
        for rank, state in states.items()
    }


def _pair_difference(
    states: Mapping[int, State], a: int, b: int, with_labels: bool
) -> tuple[Launch | None, Launch | None] | None:
    of_a, of_b = _common(states[a].notes, states[b].notes, a, b)
    for one, other in zip(of_a, of_b, strict=False):
        if _signature(one, with_labels) != _signature(other, with_labels):
            return one, other
    shorter = min(len(of_a), len(of_b))
    if len(of_a) > shorter and _stands_still(states[b]):
        return of_a[shorter], None
    if len(of_b) > shorter and _stands_still(states[a]):
        return None, of_b[shorter]
    return None


def _common(
    notes_a: Notes, notes_b: Notes, a: int, b: int
) -> tuple[list[Launch], list[Launch]]:
    """The collectives that both ranks take part in, from where both logs start."""

    def shared(notes: Notes) -> list[Launch]:
        return [
            launch
            for launch in notes.launches
            if not launch.is_point_to_point and {a, b} <= set(launch.ranks)
        ]

    def firsts(launches: Sequence[Launch]) -> dict[str, int]:
        return {x.group: x.sequence for x in reversed(launches)}

    of_a, of_b = shared(notes_a), shared(notes_b)
    first_a, first_b = firsts(of_a), firsts(of_b)

    def kept(launch: Launch) -> bool:
        first = max(first_a.get(launch.group, 0), first_b.get(launch.group, 0))
        return launch.sequence >= first

    return list(filter(kept, of_a)), list(filter(kept, of_b))


# Where the ranks' tensors may differ in size, or in number (the root's).
_UNEVEN = ("all_to_all", "all_gather", "gather", "scatter")


def _signature(launch: Launch, with_label: bool) -> tuple[str, ...]:
    label = launch.label if with_label else ""
    payload = "" if launch.operation in _UNEVEN else launch.payload
    return launch.group, launch.operation, payload, label


def _stands_still(state: State) -> bool:
    return state.has_ended or state.waits_in is not None


def _is_deadlock(states: Mapping[int, State]) -> bool:
    """Whether every rank that has not ended waits, and no collective is complete."""
    if not all(_stands_still(state) for state in states.values()):
        return False
    waiting = [s.waits_in for s in states.values() if s.waits_in is not None]
    for launch in waiting:
        if launch.is_point_to_point:
            continue
        here = {
            rank
            for rank, state in states.items()
            if any(
                (x.group, x.sequence) == (launch.group, launch.sequence)
                and _signature(x, False) == _signature(launch, False)
                for x in state.notes.launches
            )
        }
        if here >= set(launch.ranks):
            return False  # all have arrived: it is only slow
    return bool(waiting)


def _repair(states: Mapping[int, State]) -> str:
    waiting = [s.waits_in for s in states.values() if s.waits_in is not None]
    if all(launch.is_point_to_point for launch in waiting):
        return "Every receive needs a send that its peer launches before it waits."
    return "Every rank must launch collectives in the same order."


def _what(state: State) -> str:
    if state.has_ended:
        launches = state.notes.launches
        return f"has ended, after {plural(len(launches), 'collective')}"
    if state.waits_in is not None:
        peer = (
            f" [{state.waits_in.payload}]" if state.waits_in.is_point_to_point else ""
        )
        return f"waits in {state.waits_in}{peer}"
    if state.frame is None:
        return "did not say where it is"
    return "is not in a collective"


def _in_full(launch: Launch) -> str:
    return f"{launch} {launch.payload}".rstrip()


def _original(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = loads(failure.pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
