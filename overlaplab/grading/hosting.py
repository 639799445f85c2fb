"""The process that holds a learner's objects for one exercise, and judges nothing.

A fork that has never played the cells. It calls what the judge asks it to, and answers
with plain data. The course's own solutions are no solutions here: see `hide`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any

import orjson

from overlaplab import ours
from overlaplab.deadline import Deadline, OutOfTimeError, limit_process
from overlaplab.grading.exercise import Exercise, find_exercise
from overlaplab.grading.plain import pack
from overlaplab.grading.raised import tell

# What an answer begins with.
VALUE, ERROR, OUT_OF_TIME = b"v", b"e", b"t"


def host(judge: Connection) -> None:
    """Answer calls until the judge hangs up; the first answer is the objects.

    It sends a request ("exercise", "directory" of the notebook, "sources": text of the
    cells by file name), the pickled objects, then pickled (function, arguments).
    """
    request = orjson.loads(judge.recv_bytes())
    payload = judge.recv_bytes()
    exercise = find_exercise(request["exercise"])
    limit_process(exercise.timeout_s)
    sys.path.append(request["directory"])
    remember_lines(request["sources"])
    hide(exercise)
    code = getattr(exercise.grade, "__code__", None)
    objects = _Objects(judge, "" if code is None else code.co_filename)
    try:
        with Deadline(exercise.timeout_s):
            objects.answer(lambda: pickle.loads(payload))
            while True:
                call = judge.recv_bytes()
                objects.answer(lambda call=call: objects.call(call))  # type: ignore[misc]
    except OutOfTimeError as error:
        said = [error.after, error.place, error.judged]
        judge.send_bytes(OUT_OF_TIME + orjson.dumps(said))
    except EOFError:
        pass


def remember_lines(sources: Mapping[str, str]) -> None:
    """The text of cells, for messages that show lines."""
    for name, source in sources.items():
        lines = source.splitlines(True)
        linecache.cache[name] = (len(source), None, lines, name)


class _Objects:
    """What has been named to the judge, by number."""

    def __init__(self, judge: Connection, grader_file: str) -> None:
        self._judge, self._grader_file = judge, grader_file
        self._held: list[Any] = []

    def call(self, call: bytes) -> Any:
        unpickler = _Unpickler(io.BytesIO(call))
        unpickler.held = self._held
        fn, args = unpickler.load()
        return fn(*args)

    def answer(self, work: Callable[[], Any]) -> None:
        try:
            said = VALUE + pack(work(), self._keep)
        except OutOfTimeError:
            raise
        except BaseException as error:  # whatever the learner's code raises
            said = ERROR + pack(tell(error, self._grader_file), self._keep)
        self._judge.send_bytes(said)

    def _keep(self, thing: Any) -> int:
        self._held.append(thing)
        return len(self._held) - 1


class _Unpickler(pickle.Unpickler):
    held: Sequence[Any] = ()

    def persistent_load(self, number: int) -> Any:
        return self.held[number]


# -- the course's own solutions


def reference_of(exercise: Exercise) -> ModuleType | None:
    """The module `reference` beside the graders of the lab, if there is one."""
    for point in ours.lab_entry_points():
        name = f"{point.module.rpartition('.')[0]}.reference"
        with contextlib.suppress(ModuleNotFoundError):
            if point.name == f"lab{exercise.lab}":
                return importlib.import_module(name)
    return None


def hide(exercise: Exercise) -> None:
    """The course's own solutions refuse to work, whoever refers to them.

    For the rest of this process. What is left is the text of the files.
    """
    for place in exercise.hides:
        _empty(resolve_name(place))
    module = reference_of(exercise)
    if module is None:
        return
    for name, thing in vars(module).items():
        own = getattr(thing, "__module__", "") == module.__name__
        if own and name not in exercise.lends:
            _empty(thing)
    sys.meta_path.insert(0, _ImportedOnce(module.__name__))


def _empty(thing: Any) -> None:
    if isinstance(thing, type):
        for member in vars(thing).values():
            _empty(member)
    for name in ("__func__", "fget", "fset", "func"):
        if inner := inspect.getattr_static(thing, name, None):
            _empty(getattr(thing, name, inner))
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if isinstance(thing, FunctionType):
        free = thing.__code__.co_freevars
        thing.__code__ = _refuse.__code__.replace(co_freevars=free)


def _refuse(*_: object, **__: object) -> None:
    raise LookupError("the course's own solution is not here, where yours is judged")


class _ImportedOnce:
    """Of `sys.meta_path`: a module that cannot be imported again."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._name:
            raise ImportError(f"{name} is not here, where your solution is judged")
