"""The process from whose forks cells are played, objects held, and verdicts written.

Run as `python -P fork_server.py FD FOLDER [MODULE ...]`; FOLDER is the parent's, to
work in, and is removed if the parent is gone. It imports once what each fork needs,
and runs no code of the learner's: what one does to torch or to this package does not
reach the next. It runs no torch operator either: a fork after one may hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Collection, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401
import orjson

import overlaplab.cluster.virtual
import overlaplab.view  # noqa: F401
from overlaplab.grading.channel import LAST_WORDS
from overlaplab.grading.exercise import exercises
from overlaplab.grading.hosting import host
from overlaplab.grading.playing import play
from overlaplab.grading.remote import judge_in_turn

with contextlib.suppress(ImportError):
    import IPython.core.interactiveshell  # noqa: F401

# Of Linux's prctl.
_SET_PDEATHSIG = 1  # a fork ends with this process
_SET_CHILD_SUBREAPER = 36  # orphans of its forks come to this process

# The fork that judges outlives those that it asks.
_judges: set[int] = set()

# torch imports these, for seconds, at the first step under a mode.
_DEFERRED_BY_TORCH = ("torch._dynamo", "torch._functorch.aot_autograd")

# Of an exercise: what the parent needs.
_NAMES = ("id", "title", "solution", "points", "timeout_s", "optional")


def serve(connection: Connection, folder: str) -> None:
    """Answer the parent until it hangs up; clear its folder away."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    while True:
        try:
            request = orjson.loads(connection.recv_bytes())
        except EOFError:  # maybe killed, in the middle of a cell
            _end_orphans()
            shutil.rmtree(folder, ignore_errors=True)
            return
        connection.send_bytes(orjson.dumps(_answer(request, connection)))


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _answer(request: Mapping[str, Any], connection: Connection) -> Mapping[str, Any]:
    if "exercises" in request:
        try:
            found = exercises(request["exercises"] or None)
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            return {"broken": f"{type(error).__name__}: {error} ({notes})"}
        gc.freeze()  # forks need not copy what is never collected
        return {"exercises": [{n: getattr(e, n) for n in _NAMES} for e in found]}
    if "wait" in request:
        return {"code": _exit_code(request["wait"], request["timeout_s"])}
    descriptor = reduction.recv_handle(connection)
    process = os.fork()
    if process == 0:
        try:
            _prctl(_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            connection.close()  # no verdict is written here but by the server
            os.chdir(request["folder"])
            with Connection(descriptor) as parent:
                # Held open by a process that it starts, it would hide its end.
                os.register_at_fork(after_in_child=parent.close)
                _JOBS[request["job"]](parent)
        except BaseException as error:  # not of the learner's code: jobs answer those
            with contextlib.suppress(OSError):
                Path(request["folder"], LAST_WORDS).write_text(_told(error), "utf-8")
            os._exit(1)
        finally:
            os._exit(0)
    os.close(descriptor)
    if request["job"] == "judge":
        _judges.add(process)
    return {"process": process}


def _told(error: BaseException) -> str:
    """What it is, and where: one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = traceback.format_exception_only(error)[-1].strip()
    return f"{what} (in {place.name}, {Path(place.filename).name}:{place.lineno})"


def _exit_code(process: int, timeout_s: float) -> int | None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            _judges.discard(process)
            _end_orphans(_judges)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def _end_orphans(but: Collection[int] = ()) -> None:
    """Kill all children, and what they have left: it is the server's child then."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        while left := set(map(int, path.read_text().split())) - set(but):
            for process in left:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


_JOBS = {"judge": judge_in_turn, "host": host, "play": play}

if __name__ == "__main__":
    # Modules that are named are few exercises, maybe without a step: those that have
    # one import the rest in their fork.
    for module in sys.argv[3:] or _DEFERRED_BY_TORCH:
        importlib.import_module(module)
    serve(Connection(int(sys.argv[1])), sys.argv[2])
