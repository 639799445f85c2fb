"""One thing that costs time, with its evidence and its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

FindingKind = Literal[
    "same-stream",  # the computation stands still until a collective is over
    "launched-late",  # collectives launched after the computation that hides them
    "one-bucket",  # one message for all: it can only start when the last byte is there
    "last-bucket",  # the exposed end of a step that overlaps: what is in it
    "small-messages",  # many collectives that pay more latency than wire time
    "launch-bound",  # the device waits for the CPU's launches
    "host-sync",  # the CPU waits for the device in the middle of a step
    "straggler",  # ranks wait for one that comes late
    "memcpy-in-the-way",  # copies while nothing computes and nothing is sent
    "contention",  # kernels that take longer beside communication: hidden, not saved
    "low-bandwidth",  # a collective slower than the link that the profile names
    "communication-bound",  # more to send than there is computation to hide it behind
]
FINDING_KINDS: tuple[FindingKind, ...] = get_args(FindingKind)


@dataclass(frozen=True, slots=True)
class Finding:
    """What costs time in a timeline.

    The costs of two findings may be the same time seen from two sides (a slow link
    makes the last bucket longer): they do not add up.

    Args:
        kind: see `FindingKind`.
        rank: where it costs most; of a "straggler", the rank that comes late.
        step: the step whose numbers are told; None where a timeline has no steps.
        cost_ns: what that step would be shorter by at most, without it.
        says: one or two sentences with their numbers, for people.
        remedy: what to change, by its name in PyTorch.
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
