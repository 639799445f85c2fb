"""What a timeline is made of: spans, memory, and where it was read from.

Knows no torch, no hardware, no pictures.
"""

from __future__ import annotations

import copyreg
import re
from bisect import bisect_right
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
# What memory is for, in the order in which a lane of memory stacks it.
MEMORY_KINDS = (
    "parameters",  # of modules, with their buffers
    "shards",  # a rank's part of parameters
    "states",  # the optimizer's
    "gradients",  # of parameters and of shards
    "gathered",  # parameters that an all-gather brought, for the time of their use
    "communication",  # what collectives send from and receive into, else
    "inputs",  # made outside the passes and read in a forward pass: batches, masks
    "activations",  # made in the passes, gradients of activations too
    "workspaces",  # of libraries: cuBLAS's
    "other",
)
CPU_LANE = "cpu"
NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
# What the range of a step is called, before its number: by us; and by torch.profiler,
# whose name is the one that its readers (HTA) look for.
STEP, PROFILER_STEP = "step ", "ProfilerStep#"
_STEP_LABEL = re.compile(rf"(?:{STEP}|{PROFILER_STEP})(\d{{1,18}})")


def step_number(label: str, previous: int = 0) -> int | None:
    """Which step a range called `label` marks, None if it marks none.

    Args:
        previous: the step before, of which "step" without a number is the next.

    >>> step_number("step 3"), step_number("ProfilerStep#3"), step_number("stepping")
    (3, 3, None)
    >>> step_number("step", previous=7)
    8
    """
    found = _STEP_LABEL.fullmatch(label)
    if found is None:
        return previous + 1 if label == STEP.rstrip() else None
    return int(found[1])


def _read_only(content: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(content)


# Spans travel from worker processes; neither a mapping proxy nor its class pickles.
copyreg.pickle(MappingProxyType, lambda proxy: (_read_only, (dict(proxy),)))


def lanes_of(spans: Iterable[Span], rank: int) -> list[str]:
    """The lanes of `rank`: the CPU, "default", communicators, others; of several of
    these that of the first span first.
    """
    first = {CPU_LANE: 0, "default": 1, "comm": 2}
    seen = dict.fromkeys(s.lane for s in spans if s.rank == rank)
    return sorted(seen, key=lambda lane: first.get(lane.partition(":")[0], 3))


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


@dataclass(frozen=True, slots=True)
class Memory:
    """Live device memory of one rank, over time: what a lane of memory shows.

    An allocator works in the order of the CPU, which runs ahead of the device. Bytes
    are counted in that order, and each step stands where the device comes to it: at
    the start of the first operator that was launched after it. So the peak is exact,
    and the shape is that of the step.

    Args:
        rank: whose.
        steps: ((time_ns, bytes), ...), times ascending: from each time until the next,
            so many bytes are allocated.
        holders: ((name, bytes), ...): the largest allocations at the peak, largest
            first; by the name that the user gave, else by the operator that filled it.
        kinds: ((kind, (bytes, ...)), ...): of `MEMORY_KINDS` those that occur, in that
            order; of each the bytes at every step. They add up to the step's bytes.
    """

    rank: int
    steps: tuple[tuple[int, int], ...]
    holders: tuple[tuple[str, int], ...] = ()
    kinds: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def kinds_at(self, time_ns: int) -> tuple[tuple[str, int], ...]:
        """What lives at a time: ((kind, bytes), ...), those with any."""
        place = bisect_right([time for time, _ in self.steps], time_ns) - 1
        if place < 0:
            return ()
        return tuple((kind, sizes[place]) for kind, sizes in self.kinds if sizes[place])

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at any time."""
        return max((size for _, size in self.steps), default=0)

    @property
    def peak_ns(self) -> int:
        """When that was first reached, 0 if nothing was allocated."""
        peak = self.peak_bytes
        return next((time for time, size in self.steps if size == peak), 0)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a timeline was read from: the account that a reader of traces gives.

    Args:
        files: that were read, in the order of the ranks.
        devices: (rank, "NVIDIA H200") where the trace names its devices.
        num_events: events seen in all files, whole ones.
        dropped: (reason, number of events) that could not be used: "cut off at the
            end of the file", "negative duration", ...
        communication_names: the patterns by which a kernel counts as communication.
        remarks: one sentence each: what a reader of the numbers must know ("no
            communication kernels found", "3 kernels have no launch record").
        zero_ns: what the trace's own clock said at the timeline's 0, its base time
            included: with it, a span is found again in the file.
    """

    files: tuple[str, ...] = ()
    devices: tuple[tuple[int, str], ...] = ()
    num_events: int = 0
    dropped: tuple[tuple[str, int], ...] = ()
    communication_names: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    zero_ns: int = 0

    @property
    def num_dropped(self) -> int:
        return sum(number for _, number in self.dropped)


NO_SOURCE = Source()  # of a timeline that no file gave
