"""Spans, timelines, overlap arithmetic, critical path, traces. Imports no torch."""

from overlaplab.timeline.span import CPU_LANE, KINDS, Kind, Span
from overlaplab.timeline.timeline import Timeline

__all__ = ["CPU_LANE", "KINDS", "Kind", "Span", "Timeline"]
