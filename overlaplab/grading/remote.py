"""The judge, in a process of its own: no object of a learner's is ever in it.

It asks the process that holds them (hosting.py), reads plain data, and writes the
verdict. It goes on from exercise to exercise, so that what the course's own solutions
take is computed once.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import orjson

from overlaplab.deadline import ALL_FACTOR, WALL_FACTOR, OutOfTimeError, limit_process
from overlaplab.errors import message_of
from overlaplab.grading import hosting
from overlaplab.grading.channel import SILENCE_S, Channel
from overlaplab.grading.exercise import Exercise, find_exercise
from overlaplab.grading.judging import judge
from overlaplab.grading.plain import NotPlainError, unpack
from overlaplab.grading.raised import rebuild
from overlaplab.grading.stage import GoneError, Handle, hosted_by

_LOOK_S = 0.5
_GRACE_S = 5.0  # for the other's own deadline, which says more


def judge_in_turn(parent: Connection) -> None:
    """Judge what the parent asks for until it hangs up.

    A request has "exercise", "process" (of the one that holds the objects) and
    "sources" (text of cells); then comes a handle of a connection to that process.
    """
    while True:
        try:
            request = orjson.loads(parent.recv_bytes())
            connection = Connection(reduction.recv_handle(parent))
        except EOFError:
            return
        parent.send_bytes(orjson.dumps({"started": True}))
        exercise = find_exercise(request["exercise"])
        limit_process(exercise.timeout_s)
        hosting.remember_lines(request["sources"])
        remote = RemoteHost(connection, request["process"], exercise)
        try:
            answer = _judge(exercise, remote)
        finally:
            remote.close()
            for name in request["sources"]:
                linecache.cache.pop(name, None)
        parent.send_bytes(orjson.dumps(answer))


def _judge(exercise: Exercise, remote: RemoteHost) -> Mapping[str, Any]:
    try:
        solutions = remote.objects()
    except GoneError as error:
        return {"gone": str(error)}
    except OutOfTimeError as error:
        reason = f"cannot be loaded: it was stopped {error}"
        return {"reason": reason, "judged": error.judged}
    except BaseException as error:
        return {"reason": f"cannot be loaded: {type(error).__name__}: {error}"}
    try:
        with hosted_by(remote):
            return {"verdict": judge(exercise, *solutions).to_dict()}
    except GoneError as error:
        return {"gone": str(error)}


class RemoteHost:
    """The other end of `hosting.host`.

    Args:
        connection: to it.
        process: its number, to read its CPU clock.
        exercise: whose objects it holds.
    """

    def __init__(
        self, connection: Connection, process: int, exercise: Exercise
    ) -> None:
        cpu_s = exercise.timeout_s
        self._channel = Channel(connection, min(SILENCE_S, cpu_s))
        self._process, self._cpu_s = process, cpu_s
        self._wall_ends = time.monotonic() + WALL_FACTOR * cpu_s + _GRACE_S

        # Hidden there: what graders send of it goes by value.
        reference = hosting.reference_of(exercise)
        if reference is not None:
            cloudpickle.register_pickle_by_value(reference)  # type: ignore[no-untyped-call]

    def objects(self) -> list[Any]:
        """The learner's: plain data, and handles. Once, and first.

        Raises:
            GoneError: see `ask`.
            Whatever they raise where they are unpickled.
        """
        found = self._answer()
        if type(found) is not list:
            raise GoneError("sent no objects")
        return found

    def ask(self, call: bytes) -> Any:
        """The answer to a call.

        Raises:
            GoneError: the process is gone, or what it says is no answer.
            OutOfTimeError: it has computed for too long.
            Whatever the call raised there.
        """
        try:
            self._channel.connection.send_bytes(call)
        except OSError:
            raise GoneError from None
        return self._answer()

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def _answer(self) -> Any:
        try:
            while (said := self._channel.receive_bytes(_LOOK_S)) is None:
                self._check_time()
            value, error = _meaning(said[:1], said[1:])
        except Exception as wrong:
            raise GoneError(message_of(wrong)) from None
        if error is not None:
            raise error
        return value

    def _check_time(self) -> None:
        if self._computed_s() > ALL_FACTOR * self._cpu_s + _GRACE_S:
            raise OutOfTimeError(f"{self._cpu_s:g} s of computing", "", True)
        if time.monotonic() > self._wall_ends:
            raise GoneError("does not answer")

    def _computed_s(self) -> float:
        """CPU time of the process, not of those that it has started."""
        try:
            return time.clock_gettime((~self._process << 3) | 2)  # Linux: its clock
        except (OSError, AttributeError, OverflowError):
            return 0.0


def _meaning(kind: bytes, data: bytes) -> tuple[Any, BaseException | None]:
    """What was answered: a value, or an exception to raise."""
    if kind == hosting.OUT_OF_TIME:
        after, place, judged = orjson.loads(data)
        return None, OutOfTimeError(str(after)[:80], str(place)[:200], judged is True)
    value = unpack(data, Handle)
    if kind == hosting.ERROR:
        return None, rebuild(value)
    if kind != hosting.VALUE:
        raise NotPlainError("sent what is no answer")
    return value, None
