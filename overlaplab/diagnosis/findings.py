"""One thing that costs time, with its evidence and its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FindingKind = Literal[
    "same-stream",  # communication on the stream that computes: it cannot overlap
    "launched-late",  # collectives launched after the computation that hides them
    "one-bucket",  # one message for all: it can only start when the last byte is there
    "last-bucket",  # the exposed end of a step that overlaps: what is in it
    "small-messages",  # many collectives that pay more latency than wire time
    "launch-bound",  # the device waits for the CPU's launches
    "host-sync",  # the CPU waits for the device in the middle of a step
    "straggler",  # ranks wait for one that comes late
    "memcpy-in-the-way",  # copies that hold up a collective or the computation
    "contention",  # kernels that take longer beside communication: hidden, not saved
    "low-bandwidth",  # a collective slower than the link that the profile names
]


@dataclass(frozen=True, slots=True)
class Finding:
    """What costs time in a timeline.

    Args:
        kind: see `FindingKind`.
        rank: where it costs most.
        step: number of the step, None where it concerns all of them.
        cost_ns: what the step would be shorter by at most, without it.
        says: one sentence with its numbers, for people.
        remedy: one or two sentences: what to change, by its name in PyTorch.
        evidence: JSON values: the numbers that the sentence rests on.
        spans: indices in `timeline.spans` of the spans that show it, worst first.
    """

    kind: FindingKind
    rank: int
    step: int | None
    cost_ns: int
    says: str
    remedy: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[int, ...] = ()
