"""The processes in which a notebook is graded, seen from the parent.

A server that runs no code of the learner's is forked for the cells and for each check.
The parent never unpickles what a child sends: it reads JSON, and carries the learner's
objects as bytes from the one that plays the cells to those that judge them. A child
that dies or misses its deadline is killed with everything that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import overlaplab
from overlaplab.deadline import WALL_FACTOR, machine_is_busy
from overlaplab.errors import NotebookError
from overlaplab.grading.cells import NotebookCell
from overlaplab.grading.exercise import Exercise

# A child may need so long to start (it imports torch) and, after a deadline of its
# own, to say what it was doing. On the wall, so they are guards.
_START_S = 600.0
_GRACE_S = 15.0
_MOST_DEATHS = 5
# Of a child: code of the learner's may write to its connection.
_MOST_BYTES = 256 * 2**20  # of one message
_SILENCE_S = 30.0  # in the middle of one
_LENGTH = struct.Struct("!i")  # before each, as `Connection` writes it


# An exercise, the names of its objects, and the cell in which it is solved, 0: unknown.
Order = tuple[str, tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class Objects:
    """The learner's objects for one exercise."""

    payload: bytes  # pickled; only the judging child unpickles it
    # file name -> text of the cells, for the lines in error messages
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an exercise."""

    verdict: Mapping[str, Any] | None  # `Verdict.to_dict()`, None if it came to none
    reason: str = ""  # why not, "" if there is a verdict
    # False if that was not the code's doing, as far as one can know
    judged: bool = True


@dataclass(slots=True)
class Handover:
    """What came out of the cells: objects by exercise, or why there are none."""

    objects: dict[str, Objects] = field(default_factory=dict)
    missing: dict[str, Outcome] = field(default_factory=dict)


class _Child:
    """A fork of the server in a session of its own, and a connection to it."""

    def __init__(self, server: _Server, job: str) -> None:
        self._server = server
        self._scratch = tempfile.TemporaryDirectory(dir=server.scratch.name)
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            request = {"job": job, "folder": self._scratch.name}
            self._process = int(server.ask(request, theirs)["process"])

    def send(self, message: Mapping[str, Any], payload: bytes | None = None) -> None:
        """A child that is gone shows at the next `receive`."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())
            if payload is not None:
                self._connection.send_bytes(payload)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None at the deadline.

        Raises:
            EOFError: the child is gone.
        """
        message = json.loads(self.receive_bytes(timeout_s) or b"null")
        return message if isinstance(message, dict) else None

    def receive_bytes(self, timeout_s: float) -> bytes | None:
        """The next message as it is; None at the deadline.

        Raises:
            EOFError: the child is gone, or what it sends is no message.
        """
        try:
            if not self._connection.poll(max(0.0, timeout_s)):
                return None
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if not 0 <= length <= _MOST_BYTES:
                raise EOFError
            return self._read(length)
        except OSError:  # reset
            raise EOFError from None

    def _read(self, num_bytes: int) -> bytes:
        """That many bytes of a message that has begun.

        `Connection.recv_bytes` would wait for the rest of it without end.
        """
        found = bytearray()
        while len(found) < num_bytes:
            if not self._connection.poll(_SILENCE_S):
                raise EOFError
            part = os.read(self._connection.fileno(), num_bytes - len(found))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    def how_it_ended(self) -> tuple[str, bool]:
        """("was killed by SIGKILL", whether that can only be its code's doing)."""
        try:
            request = {"wait": self._process, "timeout_s": _GRACE_S}
            code = self._server.ask(request)["code"]
        except EOFError:
            return "lost its server", False
        if code is None:
            return "closed its connection", True
        self._process = 0
        if code == -signal.SIGXCPU:
            return "did not end, nor could it be stopped", True
        if code < 0:
            name = signal.Signals(-code).name
            return f"was killed by {name}", name != "SIGKILL"
        return f"ended the process with code {code}", True

    def close(self) -> None:
        """End the child and all that it started."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
                os.killpg(self._process, signal.SIGKILL)
            with contextlib.suppress(EOFError):
                self._server.ask({"wait": self._process, "timeout_s": _GRACE_S})
        self._connection.close()
        self._scratch.cleanup()


class _Server:
    """`fork_server.py` as a process."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self.scratch = tempfile.TemporaryDirectory(prefix="overlaplab-grade-")
        package_parent = str(Path(overlaplab.__file__).parent.parent)
        paths = [package_parent, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "MPLBACKEND": "Agg",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        script = str(Path(__file__).with_name("fork_server.py"))
        with theirs:
            self.process = subprocess.Popen(
                # -P: this folder's modules (laws, cells) are not top-level ones.
                [
                    *(sys.executable, "-P", script, str(theirs.fileno())),
                    *(self.scratch.name, *modules),
                ],
                pass_fds=[theirs.fileno()],
                cwd=self.scratch.name,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def ask(
        self, request: Mapping[str, Any], handle: socket.socket | None = None
    ) -> dict[str, Any]:
        """The server's answer.

        Args:
            request: JSON values.
            handle: a socket to send with it.

        Raises:
            EOFError: the server is gone.
        """
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if handle is not None:
                reduction.send_handle(
                    self._connection, handle.fileno(), self.process.pid
                )
            if self._connection.poll(_START_S):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
        except (OSError, EOFError):
            pass
        raise EOFError(f"the judging process is gone (code {self.process.poll()})")

    def close(self) -> None:
        """End the server and its forks; whoever waits for an answer gets EOFError."""
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self.scratch.cleanup()


def _listen(
    child: _Child,
    handover: Handover,
    stop_at: float,
    cell_wall_s: float,
    progress: Callable[[str], None],
) -> tuple[int | None, Outcome | None]:
    """Take messages until the end; (cell, what became of it) if the child must go."""
    cell: int | None = None
    patience = _START_S
    try:
        while True:
            left = stop_at - time.monotonic()
            message = child.receive(min(patience, left))
            if message is None and left <= patience:
                reason = f"the deadline of the notebook passed in cell {cell}"
                return None, Outcome(None, reason, judged=False)
            if message is None:
                reason = f"cell {cell} did not end within {cell_wall_s:g} s"
                return cell, Outcome(None, reason, judged=not machine_is_busy())
            patience = cell_wall_s + _GRACE_S
            if "cell" in message:
                cell = int(message["cell"])
                progress(f"cell {cell}")
            elif "objects" in message:
                task = str(message["objects"])
                payload = child.receive_bytes(_GRACE_S)
                if payload is None:
                    reason = f"cell {cell} broke the connection to the grader"
                    return cell, Outcome(None, reason)
                handover.objects[task] = Objects(payload, dict(message["sources"]))
                handover.missing.pop(task, None)
            elif "missing" in message:
                judged = message.get("judged") is not False
                outcome = Outcome(None, str(message["reason"]), judged)
                handover.missing[str(message["missing"])] = outcome
            elif "end" in message:
                return None, None
    except (EOFError, ValueError, KeyError, TypeError, AttributeError):
        reason, own_doing = child.how_it_ended()
        return cell, Outcome(None, f"cell {cell} {reason}", own_doing)


def _elsewhere(*_: object) -> None:
    raise LookupError("this exercise is judged in another process")


class Judge:
    """Plays cells and judges objects, each in a fork of one server.

    It serves any number of notebooks, one after another.

    Args:
        modules: to import, for exercises of an instructor's own.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._server = _Server(modules)
        self._closed = False

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes; from any thread. What it still does comes to nothing."""
        self._closed = True
        self._server.close()

    def exercises(self, lab: str = "") -> tuple[Exercise, ...]:
        """Those of a lab ("06"), or all, without their graders.

        Raises:
            NotebookError: a lab, or one of the modules, cannot be imported.
        """
        try:
            answer = self._server.ask({"exercises": lab or None})
        except EOFError:  # gone, whoever killed it
            try:
                self._restart()
                answer = self._server.ask({"exercises": lab or None})
            except EOFError as error:
                raise NotebookError(f"nothing can be graded: {error}") from None
        if "broken" in answer:
            raise NotebookError(f"exercises cannot be loaded: {answer['broken']}")
        found = answer["exercises"]
        return tuple(Exercise(verifies=(), grade=_elsewhere, **e) for e in found)

    def play(
        self,
        cells: Sequence[NotebookCell],
        orders: Sequence[Order],
        directory: Path,
        *,
        stop_at: float,
        cell_timeout_s: float,
        progress: Callable[[str], None],
    ) -> Handover:
        """Run `cells` in a fork and take each exercise's objects.

        A cell that kills the fork, or hangs so that only a kill ends it, is left out
        and the others are played again in a new one. What may be the machine's fault is
        tried once more with all of them.

        Args:
            cells: in order, with the checks.
            orders: which objects to take, and where they are made.
            directory: of the notebook, for modules that it imports.
            stop_at: deadline of the whole, as `time.monotonic()` counts.
            cell_timeout_s: deadline of one cell, in CPU time.
            progress: called with which cell runs.
        """
        handover = Handover()
        left_out: dict[int, Outcome] = {}
        once_more = True
        while len(left_out) <= _MOST_DEATHS:
            script = {
                "directory": str(directory),
                "cells": [
                    [c.number, c.source] for c in cells if c.number not in left_out
                ],
                "orders": list(orders),
                "cell_timeout_s": cell_timeout_s,
            }
            try:
                child = self._fork("play")
            except EOFError as error:
                left_out[0] = Outcome(None, str(error), judged=False)
                break
            try:
                child.send(script)
                culprit, outcome = _listen(
                    child, handover, stop_at, WALL_FACTOR * cell_timeout_s, progress
                )
            finally:
                child.close()
            outcomes = [*handover.missing.values(), *([outcome] if outcome else [])]
            in_time = time.monotonic() < stop_at
            if once_more and in_time and not all(o.judged for o in outcomes):
                once_more = False
                continue
            if outcome is None:
                break
            left_out[culprit or 0] = outcome
            if culprit is None or not in_time:
                break
        for task in {order[0] for order in orders} - set(handover.objects):
            # The fate of the exercise's own cell, or of what ended all.
            own = [cell.number for cell in cells if cell.exercise == task]
            blame = next((left_out[n] for n in (*own, 0) if n in left_out), None)
            blame = blame or handover.missing.get(task)
            handover.missing[task] = blame or Outcome(None, "not found")
        return handover

    def judge(
        self, task: Exercise, objects: Objects, directory: Path, stop_at: float
    ) -> Outcome:
        """Judge; once more if the machine may be to blame that there is no verdict.

        Args:
            task: which exercise.
            objects: the learner's.
            directory: of the notebook, for modules that the objects refer to.
            stop_at: deadline of the notebook, as `time.monotonic()` counts.
        """
        request = {
            "exercise": task.id,
            "sources": dict(objects.sources),
            "directory": str(directory),
        }
        for _ in range(2):
            outcome = self._judge(task, request, objects.payload, stop_at)
            if outcome.judged:
                break
        return outcome

    def _judge(
        self, task: Exercise, request: Mapping[str, Any], payload: bytes, stop_at: float
    ) -> Outcome:
        left = stop_at - time.monotonic()
        if left <= 0:
            reason = "the deadline of the notebook had passed"
            return Outcome(None, reason, judged=False)
        try:
            child = self._fork("judge")
        except EOFError as error:
            return Outcome(None, str(error), judged=False)
        own_limit = WALL_FACTOR * task.timeout_s + _GRACE_S
        try:
            child.send(request, payload)
            answer = child.receive(min(_START_S, left))
            if answer:
                left = stop_at - time.monotonic()
                answer = child.receive(min(own_limit, left))
        except (EOFError, ValueError):
            reason, own_doing = child.how_it_ended()
            return Outcome(None, f"the code {reason} during the check", own_doing)
        finally:
            child.close()
        if answer is None:
            limit = min(own_limit, max(left, 0))
            judged = own_limit < left and not machine_is_busy()
            return Outcome(None, f"did not end within {limit:.0f} s", judged)
        verdict = answer.get("verdict")
        if not isinstance(verdict, dict):
            return Outcome(None, str(answer.get("reason", "was not verified")))
        return Outcome(verdict, judged=verdict.get("judged") is not False)

    def _fork(self, job: str) -> _Child:
        try:
            return _Child(self._server, job)
        except EOFError:
            self._restart()
            return _Child(self._server, job)

    def _restart(self) -> None:
        self._server.close()
        if self._closed:
            raise EOFError("grading was ended")
        self._server = _Server(self._modules)
