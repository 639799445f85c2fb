"""Spans, timelines, overlap arithmetic, critical path, traces. Imports no torch."""

from overlaplab.timeline.critical_path import SHARES as SHARES
from overlaplab.timeline.critical_path import CriticalPath as CriticalPath
from overlaplab.timeline.critical_path import Segment as Segment
from overlaplab.timeline.critical_path import Share as Share
from overlaplab.timeline.report import Report as Report
from overlaplab.timeline.span import CPU_LANE as CPU_LANE
from overlaplab.timeline.span import KINDS as KINDS
from overlaplab.timeline.span import MEMORY_KINDS as MEMORY_KINDS
from overlaplab.timeline.span import Kind as Kind
from overlaplab.timeline.span import Memory as Memory
from overlaplab.timeline.span import Source as Source
from overlaplab.timeline.span import Span as Span
from overlaplab.timeline.timeline import Timeline as Timeline
