"""What the learner's code raised: what a verdict says of it, and how it is told.

`tell` makes plain data of an exception where it was raised; `rebuild` makes one that
graders can catch in its place: of the nearest class of Python's or of this package's.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from overlaplab import errors
from overlaplab.errors import OverlaplabError, RankError, message_of
from overlaplab.ours import is_users_file

_KNOWN: Mapping[str, type[Exception]] = {
    name: kind
    for module in (builtins, errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, BaseExceptionGroup)
}
CALLED = "calling your code raised"  # what none of its own lines did
_MOST_TEXT = 10_000
_MOST_FRAMES, _MOST_CAUSES = 20, 4
# What else a verdict asks of an exception.
_FACTS: Mapping[str, type] = {"rank": int, "on_the_wall": bool, "remote_traceback": str}


def describe_error(error: BaseException, *, grader_file: str = "") -> str:
    """Who raised what, and the learner's frames of its traceback, none of ours."""
    while isinstance(error, RankError) and error.__cause__ is not None:
        error = error.__cause__
    what = f"{type(error).__name__}: {message_of(error)}".rstrip(": ")
    if isinstance(error, OverlaplabError):
        return f"your code ran into a {what}"  # a diagnosis, which says where
    lines = _learners_lines(error, grader_file)
    if not lines:
        # Called with arguments that it does not take, or a fault of ours.
        return f"{CALLED} {what}"
    return "\n".join([f"your code raised {what}", *lines])


def _learners_lines(error: BaseException, grader_file: str) -> list[str]:
    if isinstance(error, _Told):
        return error.lines
    lines = (
        f"  in {frame.name}, line {frame.lineno}: {frame.line or ''}"
        for frame in traceback.extract_tb(error.__traceback__)
        if is_users_file(frame.filename) and frame.filename != grader_file
    )
    told = []
    for line, same in groupby(lines):  # a recursion without end has a thousand
        times = sum(1 for _ in same)
        told.append(line if times == 1 else f"{line} ({times} times)")
    return told[-_MOST_FRAMES:]


def tell(error: BaseException, grader_file: str, *, causes: int = 0) -> list[Any]:
    """Plain data: classes by name, text, the learner's frames, facts, the cause."""
    cause = error.__cause__ if causes < _MOST_CAUSES else None
    facts = {n: v for n, kind in _FACTS.items() if type(v := _of(error, n)) is kind}
    return [
        [kind.__name__ for kind in type(error).__mro__],
        message_of(error)[:_MOST_TEXT],
        _learners_lines(error, grader_file)[-_MOST_FRAMES:],
        facts,
        None if cause is None else tell(cause, grader_file, causes=causes + 1),
    ]


def _of(error: BaseException, name: str) -> object:
    return getattr(error, name, None) if isinstance(error, OverlaplabError) else None


class _Told:
    """An exception that was raised in another process."""

    text: str
    lines: list[str]

    def __str__(self) -> str:
        return self.text


def rebuild(told: Any) -> BaseException:
    """The exception to raise here.

    Raises:
        ValueError, TypeError: `told` is not what `tell` made.
    """
    names, text, lines, facts, cause = told
    if not all(type(x) is str for x in (*names, text, *lines)):
        raise TypeError("an exception without its text")
    base = next((_KNOWN[n] for n in names if n in _KNOWN), BaseException)
    kind: Any = type(names[0][:100].replace("\0", ""), (_Told, base), {})
    error = kind.__new__(kind)
    error.text, error.lines = text[:_MOST_TEXT], lines[-_MOST_FRAMES:]
    for name, value in facts.items():
        if type(value) is _FACTS.get(name) and issubclass(base, OverlaplabError):
            setattr(error, name, value)
    error.__cause__ = None if cause is None else rebuild(cause)
    assert isinstance(error, BaseException)
    return error
