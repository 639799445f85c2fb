"""What a collective sends: operation, communicator, bytes, as far as a trace says."""

from __future__ import annotations

import json
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
    """One collective, or transfer, as one rank saw it.

    Args:
        operation: "all_reduce", ...
        num_bytes: the larger of what goes in and what comes out; 0 if unknown.
        said: what the trace calls it ("allreduce_coalesced"), "" if it does not say.
        dtype: "BFloat16", "" if unknown.
        communicator: its name in the process group, None if unknown.
        lane: of that communicator.
        group: the ranks in it, empty if unknown.
        group_size: 0 if unknown.
        sequence: its number on the communicator, None if unknown.
    """

    operation: str
    num_bytes: int
    said: str
    dtype: str
    communicator: str | None
    lane: str
    group: tuple[int, ...]
    group_size: int
    sequence: int | None

    @staticmethod
    def of(args: Args, kernel: str, annotation: str = "") -> Message:
        """Of the arguments, else of the range "nccl:..." around, else of the name."""
        said = str(args.collective or annotation)
        description, name = args.group_description, args.group
        elements = max(_number(args.in_elements), _number(args.out_elements))
        num_bytes = elements * _ITEM_BYTES.get(str(args.dtype).lower(), 0)
        num_bytes = _number(num_bytes or bytes_of_shapes(args))
        unknown = name in (None, "") and description in (None, "")
        return Message(
            operation=operation_of(said or kernel),
            num_bytes=num_bytes,
            said=said,
            dtype=str(args.dtype or ""),
            communicator=None if unknown else str(name or description),
            lane=_lane(description, name),
            group=_ranks(args.group_ranks),
            group_size=_number(args.group_size),
            sequence=integer(args.sequence),
        )

    def attributes(self) -> dict[str, Any]:
        """For a span: those that are known."""
        known: dict[str, Any] = {
            "collective": self.said,
            "dtype": self.dtype,
            "communicator": self.communicator,
            "group_ranks": list(self.group),
            "group_size": self.group_size,
        }
        attributes = {name: value for name, value in known.items() if value}
        if self.sequence is not None:
            attributes["sequence"] = self.sequence
        if not self.said:
            attributes["operation_from"] = "kernel name"  # which may mislead
        return attributes


def bytes_of_shapes(args: Args) -> int:
    """Bytes of the input tensors, where the profiler recorded shapes."""
    total = 0
    shapes, types = list_of(args.shapes), list_of(args.types)
    for shape, kind in zip(shapes, types, strict=False):
        size = _ITEM_BYTES.get(str(kind).lower(), 0)
        if shape and isinstance(shape, list) and all(map(_is_size, shape)):
            for n in shape:
                size *= n
            total += size
    return total


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


def _ranks(value: Any) -> tuple[int, ...]:
    """Of "[0, 1]", as the profiler writes it; long groups it cuts off with "..."."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    ranks = tuple(value) if isinstance(value, list) else ()
    return ranks if all(integer(rank) is not None for rank in ranks) else ()
