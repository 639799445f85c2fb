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
import sys
from multiprocessing.connection import Connection
from typing import Any

import orjson

import overlaplab.cluster.virtual  # noqa: F401  (before the fork, not in each)
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
        return orjson.dumps({"reason": reason})
    return answer


def _judge(request: dict[str, Any], payload: bytes) -> dict[str, Any]:
    sys.path.append(request["directory"])
    for name, source in request["sources"].items():
        lines = source.splitlines(True)
        linecache.cache[name] = (len(source), None, lines, name)
    try:
        solutions = pickle.loads(payload)
    except BaseException as error:
        return {"reason": f"cannot be loaded: {type(error).__name__}: {error}"}
    verdict = judge(find_exercise(request["exercise"]), *solutions)
    return {"verdict": verdict.to_dict()}


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    serve(Connection(int(sys.argv[1])))
