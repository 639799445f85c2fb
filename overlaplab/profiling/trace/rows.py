"""One event of a trace as it stands in the file: only the fields that are used.

Times stay digits until they are integers of nanoseconds: a float of microseconds
since 1970 has lost them.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, TypeVar

import msgspec

_What = TypeVar("_What")
_LARGEST_NS = 1 << 62
_LONGEST_TEXT = 32
_NS_OF_LAST_DIGIT = (1000, 100, 10, 1)  # by the number of digits after the point


class Args(msgspec.Struct, gc=False):
    """The arguments that mean something for a timeline; lists as they stand there."""

    correlation: Any = None
    external: Any = msgspec.field(default=None, name="External id")
    stream: Any = None
    device: Any = None
    bytes: Any = None
    grid: msgspec.Raw = msgspec.Raw()
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(
        default=None, name="Process Group Description"
    )
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")

    @property
    def is_message(self) -> bool:
        """Whether they say anything of a collective."""
        return (
            self.collective is not None
            or self.group is not None
            or self.sequence is not None
        )

    def whole(self) -> Args:
        """With texts of its own: those of the decoder keep the whole batch alive."""
        self.grid = msgspec.Raw()
        self.shapes, self.types = self.shapes.copy(), self.types.copy()
        return self


NO_ARGS = Args()


def list_of(text: msgspec.Raw) -> list[Any]:
    """A list that stands in a file, [] if something else does."""
    try:
        value = msgspec.json.decode(text) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def integer(value: Any) -> int | None:
    """`value`, None if it is no integer, or one that no number of 64 bits holds."""
    return value if type(value) is int and abs(value) < _LARGEST_NS else None


class RowWithoutArgs(msgspec.Struct, gc=False):
    """An element of traceEvents whose args are no object."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None  # fractions are texts, see `decoder`
    dur: Any = None

    def as_row(self) -> Row:
        return Row(*msgspec.structs.astuple(self))


class Row(RowWithoutArgs, gc=False):
    """One element of traceEvents."""

    args: Args | None = None


def decoder(what: type[_What]) -> msgspec.json.Decoder[_What]:
    """Of `what`; fractions stay the texts that they are in the file."""
    return msgspec.json.Decoder(what, float_hook=str)


def nanoseconds(microseconds: Any) -> int | None:
    """The exact number, to the nearest nanosecond; None if it is none.

    Args:
        microseconds: what the decoder made of them: an integer, or a text of digits.

    >>> nanoseconds("1712195495519689.123"), nanoseconds("0.5"), nanoseconds(7)
    (1712195495519689123, 500, 7000)
    """
    if type(microseconds) is str and len(microseconds) < _LONGEST_TEXT:
        whole, _, part = microseconds.partition(".")
        if len(part) <= 3 and (digits := whole + part).isdecimal():
            exact_ns: int = int(digits) * _NS_OF_LAST_DIGIT[len(part)]
            return exact_ns if exact_ns < _LARGEST_NS else None
    elif type(microseconds) is bool:
        return None
    try:
        exact = Decimal(microseconds) * 1000
        if abs(exact) < _LARGEST_NS:
            return int(exact.to_integral_value())
    except (ArithmeticError, TypeError, ValueError):
        pass
    return None
