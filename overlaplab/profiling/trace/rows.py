"""One event of a trace as it stands in the file: only the fields that are used; and
what those say of a collective: operation, communicator, bytes.

Times stay digits until they are integers of nanoseconds: a float of microseconds
since 1970 has lost them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from overlaplab.profiling.trace.names import ITEM_BYTES, operation_of

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
    """The exact number, to the nearest nanosecond, of what the decoder made of
    microseconds: an integer, or a text of digits; None if it is none.

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


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, or transfer, as one rank saw it."""

    operation: str  # "all_reduce", ...
    num_bytes: int  # the larger of what goes in and what comes out; 0 if unknown
    lane: str  # of its communicator, "" where that is unknown
    attributes: dict[str, Any]  # for a span; those that are known

    @staticmethod
    def of(args: Args, kernel: str, annotation: str = "") -> Message:
        """Of the arguments, else of the range "nccl:..." around, else of the name."""
        said = str(args.collective or annotation)
        description, name = args.group_description, args.group
        elements = max(_number(args.in_elements), _number(args.out_elements))
        num_bytes = elements * ITEM_BYTES.get(str(args.dtype).lower(), 0)
        unknown = name in (None, "") and description in (None, "")
        about = {
            "collective": said,
            "dtype": str(args.dtype or ""),
            "communicator": "" if unknown else str(name or description),
            "group_ranks": _ranks(args.group_ranks),
            "group_size": _number(args.group_size),
        }
        attributes = {key: value for key, value in about.items() if value}
        if (sequence := integer(args.sequence)) is not None:
            attributes["sequence"] = sequence
        if not said:
            attributes["operation_from"] = "kernel name"  # which may mislead
        return Message(
            operation_of(said or kernel),
            _number(num_bytes or bytes_of_shapes(args)),
            "" if unknown else _lane(description, name),
            attributes,
        )


def bytes_of_shapes(args: Args) -> int:
    """Bytes of the input tensors, where the profiler recorded shapes."""
    return sum(
        math.prod(shape) * ITEM_BYTES.get(str(kind).lower(), 0)
        for shape, kind in zip(list_of(args.shapes), list_of(args.types), strict=False)
        if shape and isinstance(shape, list) and all(map(_is_size, shape))
    )


def _lane(description: Any, name: Any) -> str:
    if description in (None, "", "default_pg") and name in (None, "", "0"):
        return "comm"
    if description in (None, "", "undefined"):
        return f"comm:{name}"
    return "comm" if description == "default_pg" else f"comm:{description}"


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> int:
    number = integer(value)
    return number if number is not None and number > 0 else 0


def _ranks(value: Any) -> list[int]:
    """Of "[0, 1]", as the profiler writes it; long groups it cuts off with "..."."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    is_list = isinstance(value, list) and all(integer(n) is not None for n in value)
    return value if is_list else []
