"""Plays a notebook's cells and hands over the learner's objects.

Runs in a fork of its own, and judges nothing: the parent says which objects to take,
and when. Whatever the cells do to this process stays here.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import orjson

from overlaplab.deadline import Deadline, OutOfTimeError, limit_process
from overlaplab.errors import message_of


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


def play(parent: Connection) -> None:
    """Run the cells of the script that `parent` sends, sending what exercises need.

    A script has "directory", of the notebook; "cells": [[number, source], ...];
    "orders": [[exercise, names, number of the cell before which they are taken, or
    None], ...]; "cell_timeout_s".
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
    errors: dict[int, _Fate] = {}
    waiting = list(script["orders"])
    for number, source in script["cells"]:
        for order in list(waiting):
            task, names, before = order
            if before is not None and before <= number:
                waiting.remove(order)
                _hand_over(task, names, player.namespace, errors, send)
        send({"cell": number})
        limit_s = float(script["cell_timeout_s"])
        error = _run(player, source, limit_s)
        if isinstance(error, OutOfTimeError):
            said = f"cell {number} did not end within {error.after}, {error.place}"
            errors[number] = _Fate(said, error.judged)
        elif error is not None:
            said = f"cell {number} raised {type(error).__name__}: {message_of(error)}"
            errors[number] = _Fate(said)
    for task, names, _ in waiting:
        _hand_over(task, names, player.namespace, errors, send)
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


def _hand_over(
    task: str,
    names: Sequence[str],
    namespace: Mapping[str, Any],
    errors: Mapping[int, _Fate],
    send: Callable[..., None],
) -> None:
    absent = [name for name in names if name not in namespace]
    if absent:
        reason = f"the notebook defines no {', '.join(absent)}"
        judged = True
        if errors:
            last = list(errors.values())[-1]
            reason, judged = f"{reason}; {last.reason}", last.judged
        return send({"missing": task, "reason": reason, "judged": judged})
    try:
        payload = cloudpickle.dumps([namespace[name] for name in names])  # type: ignore[no-untyped-call]
    except BaseException as error:
        reason = f"{', '.join(names)} cannot be copied: "
        reason += f"{type(error).__name__}: {message_of(error)}"
        return send({"missing": task, "reason": reason})
    return send({"objects": task, "sources": _sources()}, payload)


def _sources() -> dict[str, str]:
    found = {}
    for name, entry in list(linecache.cache.items()):
        lines: Sequence[str] = entry[2] if len(entry) > 2 else ()
        if name.startswith("<ipython-input"):
            found[name] = "".join(lines)
    return found
