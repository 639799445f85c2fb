"""Spans, timelines, overlap arithmetic, critical path, traces. Imports no torch."""

from overlaplab.timeline.critical_path import SHARES, CriticalPath, Segment, Share
from overlaplab.timeline.report import Report
from overlaplab.timeline.span import (
    CPU_LANE,
    KINDS,
    MEMORY_KINDS,
    Kind,
    Memory,
    Source,
    Span,
)
from overlaplab.timeline.timeline import Timeline

__all__ = [
    "CPU_LANE",
    "KINDS",
    "MEMORY_KINDS",
    "SHARES",
    "CriticalPath",
    "Kind",
    "Memory",
    "Report",
    "Segment",
    "Share",
    "Source",
    "Span",
    "Timeline",
]
