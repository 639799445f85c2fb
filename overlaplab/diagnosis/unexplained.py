"""Idle and exposed time that no finding names: said, so that silence is not "fine"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlaplab.diagnosis.account import Entry
from overlaplab.diagnosis.case import Case
from overlaplab.diagnosis.findings import Finding, FindingKind
from overlaplab.diagnosis.rules_messages import worth_telling
from overlaplab.view.units import format_ns

# Which findings speak of an entry of the account; one of them is enough.
_LINK: tuple[FindingKind, ...] = ("low-bandwidth", "straggler", "communication-bound")
_NAMED_BY: Mapping[Entry, tuple[FindingKind, ...]] = {
    "idle_cpu": ("launch-bound",),
    "idle_sync": ("host-sync",),
    "idle_other": (),
    "sending_last": ("launched-late", "one-bucket", "last-bucket", *_LINK),
    "sending_cpu": ("launch-bound", *_LINK),
    "sending_awaited": ("same-stream", *_LINK),
    "sending_other": _LINK,
}


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Of one rank's step.

    Args:
        idle_ns, exposed_ns: entries of the account that no finding of this step names.
    """

    rank: int
    step: int | None
    idle_ns: int
    exposed_ns: int

    def __str__(self) -> str:
        where = f"of rank {self.rank}"
        where += "" if self.step is None else f", step {self.step}"
        idle, exposed = format_ns(self.idle_ns), format_ns(self.exposed_ns)
        return f"Not explained by findings: {idle} idle, {exposed} exposed ({where})."


def unexplained(case: Case, found: Sequence[Finding]) -> Unexplained | None:
    """What is left of the step that is told of; None where that is not worth telling.

    Args:
        found: the findings of all ranks and steps.
    """
    told = case.told
    if told is None:
        return None
    # A straggler is told on the rank that comes late, and costs the others.
    kinds = {
        f.kind
        for f in found
        if f.step == told.step and (f.rank == told.rank or f.kind == "straggler")
    }
    left = {
        entry: told.parts[entry]
        for entry, names in _NAMED_BY.items()
        if kinds.isdisjoint(names)
    }
    idle_ns = sum(ns for entry, ns in left.items() if entry.startswith("idle"))
    exposed_ns = sum(left.values()) - idle_ns
    if not worth_telling(idle_ns, told) and not worth_telling(exposed_ns, told):
        return None
    return Unexplained(told.rank, told.step, idle_ns, exposed_ns)
