"""Plays a notebook's cells and hands over the learner's objects.

Runs in a fork of its own, and judges nothing: `check` only hands its arguments over
here. Whatever the cells do to this process stays here.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import orjson

from overlaplab.cluster.pool.pickling import dumps
from overlaplab.deadline import Deadline, OutOfTimeError, limit_process
from overlaplab.errors import message_of
from overlaplab.grading import judging
from overlaplab.grading.kept import note
from overlaplab.grading.verdict import Verdict


class _ShellPlayer:
    """IPython's shell without a kernel: magics and display() work."""

    def __init__(self) -> None:
        from IPython.core.interactiveshell import InteractiveShell

        class Shell(InteractiveShell):
            def enable_gui(self, gui: Any = None) -> None:
                """`%matplotlib` asks for one; there is none."""

        self._shell = Shell.instance()
        self.namespace: dict[str, Any] = self._shell.user_ns

    def run(self, source: str) -> BaseException | None:
        result: Any = self._shell.run_cell(source, store_history=False)  # type: ignore[no-untyped-call]
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        return error


class _PlainPlayer:
    """Without IPython: plain cells only."""

    def __init__(self) -> None:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.namespace: dict[str, Any] = main.__dict__
        self._count = 0

    def run(self, source: str) -> BaseException | None:
        self._count += 1
        name = f"<ipython-input-{self._count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            exec(compile(source, name, "exec"), self.namespace)
        except BaseException as error:
            return error
        return None


class _Fate(NamedTuple):
    """Why a cell did not run to its end, and whether its code is to blame."""

    reason: str
    judged: bool = True
    lacks: str = ""  # the name that it looked for


def play(parent: Connection) -> None:
    """Run the cells of the script that `parent` sends, sending what exercises need.

    A script has "directory", of the notebook; "cells": [[number, source], ...];
    "orders": [[exercise, names, number of the exercise's own cell or 0], ...];
    "cell_timeout_s".
    """
    script = orjson.loads(parent.recv_bytes())
    sys.path.append(script["directory"])

    def send(message: Mapping[str, Any], payload: bytes | None = None) -> None:
        parent.send_bytes(orjson.dumps(message))
        if payload is not None:
            parent.send_bytes(payload)

    try:
        player: _ShellPlayer | _PlainPlayer = _ShellPlayer()
    except ImportError:
        player = _PlainPlayer()
    taker = _Taker(script["orders"], player.namespace, send)
    judging.check = taker.check
    errors: dict[int, _Fate] = {}
    for number, source in script["cells"]:
        send({"cell": number})
        limit_s = float(script["cell_timeout_s"])
        error = _run(player, source, limit_s)
        if isinstance(error, OutOfTimeError):
            said = f"cell {number} did not end within {error.after}, {error.place}"
            errors[number] = _Fate(said, error.judged)
        elif error is not None:
            said = f"cell {number} raised {type(error).__name__}: {message_of(error)}"
            name = str(error.name) if isinstance(error, NameError) else ""
            errors[number] = _Fate(said, lacks=name)
        taker.end_cell(number)
    taker.end(errors)
    send({"end": True})


def _run(
    player: _ShellPlayer | _PlainPlayer, source: str, timeout_s: float
) -> BaseException | None:
    limit_process(timeout_s)
    try:
        with Deadline(timeout_s):
            return player.run(source)
    except BaseException as error:
        return error


class _Taker:
    """Takes each exercise's objects once, as its check would have got them.

    What counts is the check that follows the exercise's own cell, or stands in it: a
    copy further up or down does not. Without one, what the names stand for where the
    cell ends; without a cell, at the end.

    Args:
        orders: of the script.
        namespace: of the notebook.
        send: a message, and a payload.
    """

    def __init__(
        self,
        orders: Sequence[tuple[str, Sequence[str], int]],
        namespace: Mapping[str, Any],
        send: Callable[..., None],
    ) -> None:
        self._names = {task: names for task, names, _ in orders}
        self._own_cells = {task: cell for task, _, cell in orders}
        self._namespace = namespace
        self._send = send
        self._called: dict[str, bytes | str] = {}  # in this cell: objects, or why not
        self._taken: dict[str, bool] = {}  # whether for good

    def check(self, exercise_id: str, *solutions: object) -> Verdict:
        """Stands in the place of `check`: keeps what it is given, says nothing."""
        note(exercise_id, False)  # cells that ask show what they show unsolved
        names = self._names.get(exercise_id, ())
        if len(names) == len(solutions):
            self._called[exercise_id] = _packed(names, solutions)
        return Verdict(exercise_id, "", True)

    def end_cell(self, number: int) -> None:
        """Hand over what the cell's checks were given, and what it defined."""
        for task, packed in self._called.items():
            if not self._taken.get(task):
                self._hand_over(task, packed, final=number >= self._own_cells[task])
        self._called.clear()
        for task, names in self._names.items():
            if self._own_cells[task] == number and task not in self._taken:
                self._by_name(task, names)

    def end(self, errors: Mapping[int, _Fate]) -> None:
        """Hand over what no check was given, or say why it is not there."""
        for task, names in self._names.items():
            if task in self._taken or self._by_name(task, names):
                continue
            absent = [name for name in names if name not in self._namespace]
            reason = f"the notebook defines no {', '.join(absent)}"
            told = [fate for fate in errors.values() if fate.lacks not in absent]
            fate = errors.get(self._own_cells[task]) or (told[-1] if told else None)
            judged = fate is None or fate.judged
            reason += f"; {fate.reason}" if fate else ""
            self._send({"missing": task, "reason": reason, "judged": judged})

    def _by_name(self, task: str, names: Sequence[str]) -> bool:
        if not all(name in self._namespace for name in names):
            return False
        self._hand_over(task, _packed(names, [self._namespace[n] for n in names]))
        return True

    def _hand_over(
        self, task: str, packed: bytes | str, *, final: bool = False
    ) -> None:
        self._taken[task] = final
        if isinstance(packed, str):
            self._send({"missing": task, "reason": packed})
        else:
            self._send({"objects": task, "sources": _sources()}, packed)


def _packed(names: Sequence[str], objects: Sequence[object]) -> bytes | str:
    """Pickled by value, or why not."""
    try:
        return dumps(list(objects), detach=True)
    except BaseException as error:
        reason = f"{', '.join(names)} cannot be copied: "
        return reason + f"{type(error).__name__}: {message_of(error)}"


def _sources() -> dict[str, str]:
    found = {}
    for name, entry in list(linecache.cache.items()):
        lines: Sequence[str] = entry[2] if len(entry) > 2 else ()
        if name.startswith("<ipython-input"):
            found[name] = "".join(lines)
    return found
