"""What a diagnosis is, as data: `text`, `page` and `record` present it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlaplab.diagnosis.case import Case
from overlaplab.diagnosis.findings import Finding, Unexplained
from overlaplab.diagnosis.makers import Maker
from overlaplab.diagnosis.saved import Saved
from overlaplab.timeline import Timeline


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """What a timeline's steps lose, most expensive first.

    Args:
        case: the timeline, taken apart.
        findings: the most expensive first; see `Finding`.
        saved: for each (rank, step) what overlap saved, and against what.
        remarks: what a reader of the numbers must know, one sentence each.
        unexplained: idle and exposed time of the step that is described which no
            finding names; None where it is little.
    """

    case: Case
    findings: tuple[Finding, ...]
    saved: Mapping[tuple[int, int | None], Saved]
    remarks: tuple[str, ...]
    unexplained: Unexplained | None = None

    @property
    def timeline(self) -> Timeline:
        return self.case.timeline

    @property
    def makers(self) -> tuple[Maker, ...]:
        """Who launched the collectives."""
        return self.case.makers

    @property
    def has_device(self) -> bool:
        """Whether anything ran on a device, or the timeline is empty."""
        lookup = self.case.lookup
        return not lookup.ranks or any(map(lookup.device, lookup.ranks))

    @property
    def has_communication(self) -> bool:
        return any(step.communication for step in self.case.steps)
