"""One event of a trace as it stands in the file: only the fields that are used.

Times stay digits until they are integers of nanoseconds: a float of microseconds
since 1970 has lost them.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

_LARGEST_NS = 1 << 62
_EXACT_FLOAT = float(1 << 41)


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
        of_message = (self.collective, self.group, self.sequence)
        return any(value is not None for value in of_message)

    def whole(self) -> Args:
        """With texts of its own: those of the decoder keep the whole batch alive."""
        self.grid = msgspec.Raw()
        self.shapes, self.types = self.shapes.copy(), self.types.copy()
        return self


NO_ARGS = Args()


def list_of(text: msgspec.Raw) -> list[Any]:
    """A list that stands in a file, [] if something else does."""
    value = msgspec.json.decode(text) if text else None
    return value if isinstance(value, list) else []


class Row(msgspec.Struct, gc=False):
    """One element of traceEvents."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: Any = None
    args: Args | None = None


class RowWithoutArgs(msgspec.Struct, gc=False):
    """One whose args are no object."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: Any = None

    def as_row(self) -> Row:
        return Row(
            self.ph, self.cat, self.name, self.pid, self.tid, self.ts, self.dur, None
        )


def nanoseconds(microseconds: Any) -> int | None:
    """The exact number, to the nearest nanosecond; None if it is none.

    Args:
        microseconds: digits, or what a decoder made of them; a float is exact enough
            below 2**41.

    >>> nanoseconds(msgspec.Raw(b"1712195495519689.123")), nanoseconds("0.5")
    (1712195495519689123, 500)
    """
    kind = type(microseconds)
    if kind is float and abs(microseconds) < _EXACT_FLOAT:
        nearest: int = round(microseconds * 1000)
        return nearest
    if kind is int and abs(microseconds) < _EXACT_FLOAT:
        return int(microseconds) * 1000
    if kind is msgspec.Raw:
        digits = bytes(microseconds)
        try:
            # Of what JSON allows, only exponents and strings are refused here.
            if digits[-4:-3] == b".":
                return int(digits[:-4] + digits[-3:])
            if digits.isdigit() and len(digits) < 17:
                return int(digits) * 1000
        except ValueError:
            pass
        microseconds = digits.strip(b'" ').decode(errors="replace")
    elif kind is bool:
        return None
    try:
        exact = Decimal(microseconds) * 1000
        if abs(exact) < _LARGEST_NS:
            return int(exact.to_integral_value())
    except (InvalidOperation, TypeError, ValueError):
        pass
    return None
