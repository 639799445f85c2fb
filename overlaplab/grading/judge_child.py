"""The child that judges a learner's objects; it has never run the notebook.

Run as `python -P judge_child.py FD [MODULE ...]`. Each
exercise is judged in a fork of its own, so that what one does to torch or to this
package does not reach the next. The server itself runs no torch operator: a fork after
one may hang.
"""

from __future__ import annotations

import importlib
import linecache
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import orjson

# Before the fork, not in each: torch imports these at the first step under a mode.
import torch._dynamo
import torch._functorch.aot_autograd  # noqa: F401

import overlaplab.cluster.virtual  # noqa: F401
from overlaplab.deadline import limit_process
from overlaplab.grading.check import judge
from overlaplab.grading.exercise import find_exercise


def serve(connection: Connection) -> None:
    """Judge exercise after exercise until the parent hangs up."""
    while True:
        try:
            request = orjson.loads(connection.recv_bytes())
            payload = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(orjson.dumps({"started": request["exercise"]}))
        answer = _judge_in_fork(request, payload)
        connection.send_bytes(answer)


def _judge_in_fork(request: dict[str, Any], payload: bytes) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        answer = b""
        try:
            answer = orjson.dumps(_judge(request, payload))
        finally:
            with os.fdopen(writing, "wb") as file:
                file.write(answer)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    try:
        orjson.loads(answer)
    except orjson.JSONDecodeError:
        code = os.waitstatus_to_exitcode(status)
        reason = f"the code ended the process (code {code}) during the check"
        if code == -signal.SIGXCPU:
            reason = "the code did not end, nor could it be stopped"
        # Out of memory, or somebody's hand: nobody knows whose doing.
        return orjson.dumps({"reason": reason, "judged": code != -signal.SIGKILL})
    return answer


def _judge(request: dict[str, Any], payload: bytes) -> dict[str, Any]:
    exercise = find_exercise(request["exercise"])
    limit_process(exercise.timeout_s)
    sys.path.append(request["directory"])
    for name, source in request["sources"].items():
        lines = source.splitlines(True)
        linecache.cache[name] = (len(source), None, lines, name)
    try:
        solutions = pickle.loads(payload)
    except BaseException as error:
        return {"reason": f"cannot be loaded: {type(error).__name__}: {error}"}
    verdict = judge(exercise, *solutions)
    return {"verdict": verdict.to_dict()}


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    serve(Connection(int(sys.argv[1])))
