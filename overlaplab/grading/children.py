"""The two child processes of `grade_notebook`, seen from the parent.

The parent never unpickles what a child sends: it reads JSON, and carries the learner's
objects as bytes from the one that plays the cells to the one that judges them. A child
that dies or misses its deadline is killed with everything that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import overlaplab
from overlaplab.grading.exercise import Exercise

if TYPE_CHECKING:
    from overlaplab.grading.notebook import NotebookCell

# A child may need so long to start (it imports torch) and, after a deadline of its
# own, to say what it was doing.
_START_S = 120.0
_GRACE_S = 5.0
_MOST_DEATHS = 5


Tell = Callable[[str], None]


def say_nothing(what: str) -> None:
    """Tells nobody what is going on."""


@dataclass(frozen=True, slots=True)
class Order:
    """Take the objects `names` for `exercise` before cell `before` (None: last)."""

    exercise: str
    names: tuple[str, ...]
    before: int | None


@dataclass(frozen=True, slots=True)
class Objects:
    """The learner's objects for one exercise.

    Args:
        payload: pickled; only the judging child unpickles it.
        sources: file name -> text of the cells, for the lines in error messages.
    """

    payload: bytes
    sources: Mapping[str, str]


@dataclass(slots=True)
class Handover:
    """What came out of the cells: objects by exercise, or why there are none."""

    objects: dict[str, Objects] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


class _Child:
    """A file of this folder as a process in a session of its own, and a connection."""

    def __init__(self, file: str, *arguments: str) -> None:
        ours, theirs = socket.socketpair()
        self._scratch = tempfile.TemporaryDirectory(prefix="overlaplab-grade-")
        package_parent = str(Path(overlaplab.__file__).parent.parent)
        paths = [package_parent, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "MPLBACKEND": "Agg",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        script = str(Path(__file__).with_name(file))
        with theirs:
            self._process = subprocess.Popen(
                # -P: this folder's modules (check, laws) are not top-level ones.
                [sys.executable, "-P", script, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                cwd=self._scratch.name,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

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
        """The next message as it is; None at the deadline."""
        try:
            if not self._connection.poll(max(0.0, timeout_s)):
                return None
            return self._connection.recv_bytes()
        except (OSError, ValueError):  # reset, or no length where one should be
            raise EOFError from None

    def how_it_ended(self) -> str:
        """For a person: "was killed by SIGKILL", "exited with code 3"."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended the process with code {code}"

    def close(self) -> None:
        """End the child and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._scratch.cleanup()


def play_cells(
    cells: Sequence[NotebookCell],
    orders: Sequence[Order],
    directory: Path,
    *,
    stop_at: float,
    cell_timeout_s: float,
    tell: Tell = say_nothing,
) -> Handover:
    """Run `cells` in a child and take each exercise's objects.

    A cell that kills the child, or hangs so that only a kill ends it, is left out and
    the others are played again in a new child.

    Args:
        cells: in order, without the checks.
        orders: which objects to take, and when.
        directory: of the notebook, for modules that it imports.
        stop_at: deadline of the whole, as `time.monotonic()` counts.
        cell_timeout_s: deadline of one cell.
        tell: is told which cell runs.
    """
    handover = Handover()
    left_out: dict[int, str] = {}
    while len(left_out) <= _MOST_DEATHS:
        playing = [cell for cell in cells if cell.number not in left_out]
        script = {
            "cells": [[c.number, c.source] for c in playing],
            "orders": [
                [order.exercise, order.names, order.before]
                for order in orders
                if order.exercise not in handover.objects
            ],
            "cell_timeout_s": cell_timeout_s,
        }
        child = _Child("play_child.py", str(directory))
        try:
            child.send(script)
            culprit, reason = _listen(child, handover, stop_at, cell_timeout_s, tell)
        finally:
            child.close()
        if reason == "":
            break
        if culprit is None or time.monotonic() >= stop_at:
            left_out.setdefault(culprit or 0, reason)
            break
        left_out[culprit] = reason
    for order in orders:
        task = order.exercise
        if task not in handover.objects:
            blame = _blame(task, cells, left_out)
            handover.missing[task] = blame or handover.missing.get(task, "not found")
    return handover


def _blame(
    task: str, cells: Sequence[NotebookCell], left_out: Mapping[int, str]
) -> str:
    """The fate of the exercise's own cell, else of the last cell that ended a child."""
    own = [cell.number for cell in cells if cell.exercise == task]
    for number in own:
        if number in left_out:
            return left_out[number]
    return list(left_out.values())[-1] if 0 in left_out else ""


def _listen(
    child: _Child,
    handover: Handover,
    stop_at: float,
    cell_timeout_s: float,
    tell: Tell,
) -> tuple[int | None, str]:
    """Take messages until the end; returns (cell, reason) if the child must go."""
    cell: int | None = None
    patience = _START_S
    try:
        while True:
            left = stop_at - time.monotonic()
            message = child.receive(min(patience, left))
            if message is None:
                if left <= patience:
                    return cell, f"the deadline of the notebook passed in cell {cell}"
                return cell, f"cell {cell} did not end within {cell_timeout_s:g} s"
            patience = cell_timeout_s + _GRACE_S
            if "cell" in message:
                cell = int(message["cell"])
                tell(f"cell {cell}")
            elif "objects" in message:
                task = str(message["objects"])
                payload = child.receive_bytes(_GRACE_S)
                if payload is None:
                    return cell, f"cell {cell} broke the connection to the grader"
                handover.objects[task] = Objects(payload, dict(message["sources"]))
                handover.missing.pop(task, None)
            elif "missing" in message:
                handover.missing[str(message["missing"])] = str(message["reason"])
            elif "end" in message:
                return None, ""
    except (EOFError, ValueError, KeyError, TypeError, AttributeError):
        return cell, f"cell {cell} {child.how_it_ended()}"


class Judge:
    """The child that judges objects; a new one takes over when one has to go.

    It serves any number of notebooks, one after another.

    Args:
        modules: to import, for exercises of an instructor's own.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.modules = tuple(modules)
        self._child: _Child | None = None

    def __enter__(self) -> Judge:
        self._child = self._start()  # imports while the cells are played
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._drop()

    def judge(
        self, task: Exercise, objects: Objects, directory: Path, stop_at: float
    ) -> tuple[Mapping[str, Any] | None, str]:
        """(the verdict, "") or (None, why there is none).

        Args:
            task: which exercise.
            objects: the learner's.
            directory: of the notebook, for modules that the objects refer to.
            stop_at: deadline of the notebook, as `time.monotonic()` counts.
        """
        if time.monotonic() >= stop_at:
            return None, "the deadline of the notebook had passed"
        child = self._child or self._start()
        self._child = child
        request = {
            "exercise": task.id,
            "sources": dict(objects.sources),
            "directory": str(directory),
        }
        child.send(request, objects.payload)
        own_limit = task.timeout_s + _GRACE_S
        try:
            started = child.receive(min(_START_S, stop_at - time.monotonic()))
            left = stop_at - time.monotonic()
            answer = child.receive(min(own_limit, left)) if started else None
        except (EOFError, ValueError):
            reason = child.how_it_ended()
            self._drop()
            return None, f"the code {reason}"
        if answer is None:
            self._drop()
            limit = task.timeout_s if own_limit < left else max(left, 0)
            return None, f"did not end within {limit:.0f} s"
        if "verdict" not in answer:
            return None, str(answer.get("reason", "was not verified"))
        return answer["verdict"], ""

    def _start(self) -> _Child:
        return _Child("judge_child.py", *self.modules)

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
