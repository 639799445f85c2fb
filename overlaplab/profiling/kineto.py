"""What torch.profiler wrote in this process -> spans, without a file's ado.

`read_trace` reads files of unknown origin; both go through `profiling.trace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from overlaplab.profiling.trace.blocks import Blocks
from overlaplab.profiling.trace.file import TraceFile, shifted
from overlaplab.profiling.trace.names import Communication
from overlaplab.timeline import Span, Timeline

Trace = Mapping[str, Any] | bytes  # torch.profiler's JSON, parsed or as it was written


def timeline_from_trace(
    trace: Trace, rank: int | None = None, *, origin: str = "trace"
) -> Timeline:
    """The timeline of one rank's trace, starting at 0.

    Args:
        trace: what `torch.profiler` exports.
        rank: whose; default: what the trace says, else 0.
        origin: of the timeline.

    Raises:
        TraceError: not a trace.
    """
    file = _read(trace)
    rank = rank if rank is not None else file.rank or 0
    return timeline_of_ranks({rank: _spans(file, rank)}, origin=origin)


def timeline_of_ranks(
    spans: Mapping[int, Sequence[Span]],
    *,
    origin: str,
    num_ranks: int | None = None,
) -> Timeline:
    """One timeline of many ranks' spans on one clock, shifted to start at 0."""
    every = [span for of_rank in spans.values() for span in of_rank]
    first_ns = min((span.start_ns for span in every), default=0)
    if first_ns:
        every = [shifted(span, -first_ns) for span in every]
    timeline = Timeline.of(every, origin=origin)
    return timeline if num_ranks is None else replace(timeline, num_ranks=num_ranks)


def spans_from_trace(trace: Trace, rank: int) -> list[Span]:
    """Spans of one rank, in nanoseconds of the machine's clock.

    The label of a span is the innermost profiler range around its launch; the step is
    the N of the enclosing `ProfilerStep#N`. If the trace holds a run that marked
    itself (`RUN_RANGE`), only what starts inside that range counts.

    Raises:
        TraceError: not a trace.
    """
    return _spans(_read(trace), rank)


def _read(trace: Trace) -> TraceFile:
    text = trace if isinstance(trace, bytes) else orjson.dumps(trace)
    return TraceFile(Blocks.of_text(text))


def _spans(file: TraceFile, rank: int) -> list[Span]:
    rank_of = dict.fromkeys(file.places or [("", 0)], rank)
    return file.spans(rank_of, Communication(), is_own=True)
