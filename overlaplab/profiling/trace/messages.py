"""What a collective sends: operation, communicator, bytes, as far as a trace says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from overlaplab.profiling.trace.names import operation_of
from overlaplab.profiling.trace.rows import Args, integer, list_of

_ITEM_BYTES = {
    "double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::bfloat16": 2,
    "c10::half": 2, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
    "bfloat16": 2, "half": 2, "byte": 1, "char": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


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
        num_bytes = elements * _ITEM_BYTES.get(str(args.dtype).lower(), 0)
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
        math.prod(shape) * _ITEM_BYTES.get(str(kind).lower(), 0)
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
