"""One thing that costs time, with its evidence and its remedy; and what none names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, get_args

from overlaplab.diagnosis.account import Entry
from overlaplab.diagnosis.collectives import Collective
from overlaplab.diagnosis.steps import Step
from overlaplab.view.units import format_ns

FindingKind = Literal[
    "same-stream",  # the computation stands still until a collective is over
    "launched-late",  # collectives launched after the computation that hides them
    "one-bucket",  # one message for all: it can only start when the last byte is there
    "last-bucket",  # the exposed end of a step that overlaps: what is in it
    "small-messages",  # many collectives that pay more latency than wire time
    "launch-bound",  # the device waits for the CPU's launches
    "input-bound",  # the device waits for the CPU to load a batch
    "cpu-elsewhere",  # the CPU launches nothing for long: the trace does not say why
    "host-sync",  # the CPU waits for the device in the middle of a step
    "straggler",  # ranks wait for one that comes late
    "memcpy-in-the-way",  # copies while nothing computes and nothing is sent
    "contention",  # kernels that take longer beside communication: hidden, not saved
    "low-bandwidth",  # a collective slower than the link that the profile names
    "communication-bound",  # more to send than there is computation to hide it behind
]
FINDING_KINDS: tuple[FindingKind, ...] = get_args(FindingKind)

REMEDIES: Mapping[str, str] = tomllib.loads(
    (files("overlaplab.diagnosis") / "remedies.toml").read_text("utf-8")
)

# Which findings speak of an entry of the account; one of them is enough.
_LINK: tuple[FindingKind, ...] = ("low-bandwidth", "straggler", "communication-bound")
_NAMED_BY: Mapping[Entry, tuple[FindingKind, ...]] = {
    "idle_cpu": ("launch-bound",),
    "idle_host": ("input-bound", "cpu-elsewhere"),
    "idle_sync": ("host-sync",),
    "idle_other": (),
    "sending_last": ("launched-late", "one-bucket", "last-bucket", *_LINK),
    "sending_cpu": ("launch-bound", *_LINK),
    "sending_awaited": ("same-stream", *_LINK),
    "sending_other": _LINK,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What costs time in a timeline.

    The costs of two findings may be the same time seen from two sides (a slow link
    makes the last bucket longer): they do not add up.

    Args:
        kind: see `FindingKind`.
        rank: where it costs most; of a "straggler", the rank that comes late.
        step: the step whose numbers are described; None where a timeline has no steps.
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


def finding(
    kind: FindingKind,
    step: Step,
    cost_ns: int,
    *,
    says: str,
    remedy: str = "",
    spans: Iterable[Collective] | Iterable[int | None] = (),
    most_spans: int | None = 8,
    **evidence: Any,
) -> Finding:
    """What costs `step` so much; of `spans`, worst first, the first few are kept.

    Without a `remedy` it is that of its kind.
    """
    remedy = remedy or REMEDIES[kind]
    worst = (s.index if isinstance(s, Collective) else s for s in spans)
    kept = tuple(s for s in islice(worst, most_spans) if s is not None)
    evidence.setdefault("step_ns", step.step_ns)
    return Finding(kind, step.rank, step.step, cost_ns, says, remedy, evidence, kept)


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Of one rank's step what no finding names: said, so that silence is not "fine"."""

    rank: int
    step: int | None
    idle_ns: int  # entries of the account
    exposed_ns: int

    def __str__(self) -> str:
        where = f"of rank {self.rank}"
        where += "" if self.step is None else f", step {self.step}"
        idle, exposed = format_ns(self.idle_ns), format_ns(self.exposed_ns)
        return f"Not explained by findings: {idle} idle, {exposed} exposed ({where})."


def unexplained(described: Step | None, found: Sequence[Finding]) -> Unexplained | None:
    """What is left of the step that is described, without what `found` (of all ranks
    and steps) names; None where that is little."""
    if described is None:
        return None
    # A straggler is described on the rank that comes late, and costs the others.
    kinds = {
        f.kind
        for f in found
        if f.step == described.step
        and (f.rank == described.rank or f.kind == "straggler")
    }
    left = {
        entry: described.parts[entry]
        for entry, names in _NAMED_BY.items()
        if kinds.isdisjoint(names)
    }
    idle_ns = sum(ns for entry, ns in left.items() if entry.startswith("idle"))
    exposed_ns = sum(left.values()) - idle_ns
    if not any(map(described.worth_reporting, (idle_ns, exposed_ns))):
        return None
    return Unexplained(described.rank, described.step, idle_ns, exposed_ns)
