"""One interval of one lane. Knows no torch, no hardware, no pictures."""

from __future__ import annotations

import copyreg
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal[
    "compute",  # a kernel that computes, on a stream
    "communication",  # a collective or point-to-point transfer, on a communicator
    "memcpy",  # a copy between host and device, on a copy engine
    "memset",
    "launch",  # the CPU hands one operator to the device
    "host",  # the CPU waits for the device (name "wait ...") or computes
]
KINDS: tuple[Kind, ...] = (
    "compute",
    "communication",
    "memcpy",
    "memset",
    "launch",
    "host",
)
CPU_LANE = "cpu"
NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
_STEP_LABEL = re.compile(r"step(?: (\d{1,18}))?")


def step_number(label: str, previous: int = 0) -> int | None:
    """Which step a range called `label` marks, None if it marks none.

    Args:
        previous: the step before, of which "step" without a number is the next.

    >>> step_number("step 3"), step_number("step", previous=7), step_number("stepping")
    (3, 8, None)
    """
    found = _STEP_LABEL.fullmatch(label)
    if found is None:
        return None
    return previous + 1 if found[1] is None else int(found[1])


def _read_only(content: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(content)


# Spans travel from worker processes; neither a mapping proxy nor its class pickles.
copyreg.pickle(MappingProxyType, lambda proxy: (_read_only, (dict(proxy),)))


def lanes_of(spans: Iterable[Span], rank: int) -> list[str]:
    """The lanes of `rank`, CPU first, in the order of their first span."""
    seen = dict.fromkeys(s.lane for s in spans if s.rank == rank)
    return sorted(seen, key=lambda lane: lane != CPU_LANE)


@dataclass(frozen=True, slots=True)
class Span:
    """One interval [start_ns, end_ns) of one lane.

    Args:
        rank: whose.
        lane: "cpu", or the stream: "default", "comm" (the default communicator),
            "comm:NAME" (another one), "stream 1" or a name that the user gave.
        kind: see `Kind`.
        name: operator, without namespace: "mm", "all_reduce", "launch mm", "wait".
        start_ns: first nanosecond.
        end_ns: first nanosecond after it; equal to start_ns for a mark.
        bytes: moved on the link (communication, memcpy) or through memory.
        flops: floating point operations.
        attributes: JSON values. Those with a fixed meaning:
            "op": index of the operator in its rank's program;
            "label": innermost annotation ("forward", "bucket 2");
            "ready_ns": communication: when the last rank had arrived;
            "latency_ns", "wire_ns": communication: the two parts of
            [ready_ns, end_ns), which add up to it;
            "alone_ns": how long it would have taken with nothing beside it;
            "phase": "forward" or "backward", where known;
            "step": which step it belongs to: the one that launched it, in a range
            that marks it (`step_number`);
            "launch_ns": on a device: when the CPU's call that launched it began
            (measured runs; on the virtual cluster the launch has the same "op").
    """

    rank: int
    lane: str
    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0
    flops: int = 0
    attributes: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns:
            raise ValueError(
                f"span {self.name!r} of rank {self.rank} on lane {self.lane!r} ends at "
                f"{self.end_ns} ns, before it starts at {self.start_ns} ns"
            )
        if self.kind not in KINDS:
            raise ValueError(f"span kind {self.kind!r}; expected one of {KINDS}")

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns
