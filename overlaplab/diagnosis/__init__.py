"""What a timeline's step loses, in plain words, most expensive first. No torch."""

from __future__ import annotations

from typing import Any

from overlaplab.diagnosis.findings import Finding, FindingKind
from overlaplab.timeline import Timeline

__all__ = ["Finding", "FindingKind", "diagnose"]


def diagnose(timeline: Timeline, *, hardware: Any = None) -> Any:
    """Findings about a timeline, measured or virtual."""
    raise NotImplementedError
