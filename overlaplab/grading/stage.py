"""Where the learner's objects are: here in a notebook, elsewhere where it is graded.

A grader that runs on its own (`overlaplab grade`) holds a `Handle` for each function,
class or instance; numbers, texts, lists and dicts of the learner's are here as plain
data. In a notebook `check` gives a grader the objects themselves. Graders need not ask
which: call what you got, `run` it on ranks, and give whatever else must be done with
it to `job`.

    seen = stage.run(on_rank, step, world_size=2)  # never overlaplab.run
    said = schedule(6, 10)
    number = stage.job(getattr, counter, "value")
    left = stage.job(stage.call_and_return, sort_in_place, [3, 1, 2])

Functions that a job calls are defined in a module, and work on copies of what they are
given: ask for an argument that the learner's code may have changed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from overlaplab.cluster.pool.pickling import Pickler
from overlaplab.cluster.run import Run
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.program import Program, find_findings, resolve


class GoneError(BaseException):
    """What holds the learner's objects is gone, or says what is no answer.

    Its text: what it did, "" if only its end is known.
    """


class Host(Protocol):
    """What holds the learner's objects."""

    def ask(self, call: bytes) -> Any:
        """The answer to a pickled `(function, arguments)` with handles in it."""


_host: Host | None = None


@contextlib.contextmanager
def hosted_by(host: Host) -> Iterator[None]:
    """In here the learner's objects are there."""
    global _host
    before, _host = _host, host
    try:
        yield
    finally:
        _host = before


class Handle:
    """The learner's object of this number, in another process."""

    __slots__ = ("_number", "_text")

    def __init__(self, number: int, text: str) -> None:
        self._number, self._text = number, text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._there(_call, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._text:.80} is no plain data: it has no {name!r} here, ask "
            f"stage.job(getattr, it, {name!r})"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._there(iter))

    def _there(self, fn: Callable[..., Any], *args: Any) -> Any:
        if _host is None:
            raise LookupError(f"{self._text:.80} is in no process that could be asked")
        return job(fn, self, *args)

    def __repr__(self) -> str:
        return self._text


class _Pickler(Pickler):
    has_handle = False

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is not Handle:
            return None
        self.has_handle = True
        return obj._number


def job(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, done where the learner's objects in `args` are.

    Args:
        fn: a function of a module.
        args: handles may stand anywhere in them.

    Returns:
        Plain data, and handles for what has no plain form; in a notebook, the result.
    """
    if _host is None:
        return fn(*args)
    pickler: Any = _Pickler(file := io.BytesIO(), detach=False)
    try:
        pickler.dump((fn, args))
    except Exception:
        if pickler.has_handle:
            raise
    return _host.ask(file.getvalue()) if pickler.has_handle else fn(*args)


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def call_and_return(fn: Callable[..., Any], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """What `fn(*args)` returned, and the arguments as they are now."""
    return fn(*args), args


def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    hardware: str | Hardware = "h100-nvlink",
    timeout_s: float = 60,
    fake: bool = False,
    check: bool = True,
    **kwargs: Any,
) -> Run:
    """As `overlaplab.run` on the virtual cluster; recorded where the objects are.

    Timeline and findings are made here, of the record.
    """
    machine = find_hardware(hardware)
    how = {"world_size": world_size, "timeout_s": timeout_s, "fake": fake}
    values, program = job(_record, fn, args, kwargs, how)
    timeline = resolve(program, machine)
    return Run(
        values, timeline, program, find_findings(program, timeline) if check else ()
    )


def _record(
    fn: Callable[..., Any], args: Any, kwargs: Any, how: Any
) -> tuple[tuple[Any, ...], Program]:
    from overlaplab.cluster.virtual import run_virtual  # takes torch's time

    return run_virtual(fn, args, kwargs, **how)
