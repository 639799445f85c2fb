"""The errors that overlaplab raises for what it finds; arguments use ValueError.

Every message says what happened, where (rank, stream, time), what was expected and
found, and how to repair it.
"""

from __future__ import annotations

import re

# A terminal obeys the first, a reader is misled by the second (right to left), and the
# last, halves of pairs, cannot be encoded. Lines and tabs stay.
_NOT_SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """`text` with what a terminal would obey written as escapes.

    >>> print(printable("\\x1b[31mred"))
    \\x1b[31mred
    """
    return _NOT_SHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


def on_one_line(text: str) -> str:
    """`printable`, without line breaks: names of files may have some.

    >>> print(on_one_line("lab\\n06"))
    lab 06
    """
    return printable(" ".join(text.split()))


def plural(number: int, noun: str) -> str:
    """'1 step', '3 steps'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_count(name: str, value: object, of: str, *, least: int = 1) -> int:
    """The argument `name`, which is a number `of` ranks, steps, ...

    Raises:
        TypeError, ValueError: it is none, or too small.
    """
    what = f"{name} is a number of {of}; expected"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{what} at least {least}, got {value}")
    return value


class OverlaplabError(Exception):
    """Base of everything that the package itself diagnoses.

    Names in its message come from files and programs: none reaches a terminal raw.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class DeadlockError(OverlaplabError):
    """No rank can move: a cycle over streams, communicators and rendezvous."""


class MismatchError(OverlaplabError):
    """Ranks met in one collective with different operations, shapes or dtypes."""


class EventError(OverlaplabError):
    """Somebody waits for an event before it was recorded."""


class ReleasedMemoryError(OverlaplabError):
    """A tensor is used whose storage gave its memory back."""


class RankError(OverlaplabError):
    """A rank's function raised; the original exception is `__cause__`.

    Attributes:
        rank: the rank that failed first.
        remote_traceback: the text of that rank's traceback, of the user's frames.
    """

    def __init__(self, message: str, *, rank: int, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class RunTimeoutError(OverlaplabError):
    """A run passed its deadline; the message says where each rank was.

    `on_the_wall`: it had CPU time left: it slept, or the machine was busy.
    """

    on_the_wall = False


class TimedOutDeadlockError(DeadlockError, RunTimeoutError):
    """Processes passed their deadline while each waited for what cannot come."""


class CaptureError(OverlaplabError):
    """A step cannot be captured in a CUDA graph; the message says why."""


class ProgramError(OverlaplabError):
    """A recorded program cannot be resolved or edited as asked."""


class ProfileError(OverlaplabError):
    """A profile cannot be taken, or has nothing to show; the message says why."""


class TraceError(OverlaplabError):
    """A trace file cannot be read; the message names the file and what is wrong."""


class NotebookError(OverlaplabError):
    """A notebook cannot be read or graded; the message names the file and the cell."""


def message_of(error: BaseException) -> str:
    """`str(error)`, also where the user's exception cannot make its message."""
    try:  # half a surrogate pair can be neither printed nor sent
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as broken:
        return f"(its message cannot be made: {type(broken).__name__})"


_RECOMPILES = (
    "What is compiled is kept for all ranks and runs. Repair: make the backend an "
    "object of an importable class with __eq__ and __hash__ (a lambda is another one "
    "on each rank and in each run), pass dynamic=True where shapes change, or call "
    "torch._dynamo.reset() between runs"
)


def say_of_recompiles(error: BaseException) -> None:
    """Add to the message of a rank's error what to do, if Dynamo gave up."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        error.args = (f"{message_of(error)}. {_RECOMPILES}",)
