"""`draw` and `draw_many`: timelines as matplotlib figures, time to the right."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from overlaplab.timeline import Timeline
from overlaplab.view.arguments import check_timeline, check_timelines
from overlaplab.view.panel import Panel
from overlaplab.view.stacking import Picture, stack


def draw(
    timeline: Timeline,
    *,
    title: str | None = None,
    ranks: Collection[int] | None = None,
    window: tuple[int, int] | None = None,
    critical_path: bool = True,
    memory: bool = False,
) -> Picture:
    """Draw a timeline.

    Args:
        title: over the lanes; the step, exposed and saved time stand beside it.
        ranks: only these; the first eight by default, and never more than eight.
        window: (start_ns, end_ns) to show; everything by default.
        critical_path: mark it.
        memory: a lane with the bytes that each rank holds, where they are known.

    Returns:
        The figure; the last line of a cell shows it, `savefig` writes it.
    """
    check_timeline(timeline)
    panel = Panel(
        timeline,
        title or "",
        ranks=ranks,
        window=window,
        critical_path=critical_path,
        memory=memory,
    )
    return stack([panel.part()])


def draw_many(
    timelines: Mapping[str, Timeline],
    *,
    ranks: Collection[int] | None = None,
    critical_path: bool = True,
    memory: bool = False,
) -> Picture:
    """Draw timelines one under the other on one scale: the eye sees the gap close.

    Args:
        timelines: by title; each starts at its own first span.
        ranks: only these, in all of them.
        critical_path: mark it.
        memory: a lane with the bytes that each rank holds, all on one scale.
    """
    check_timelines(timelines)
    if not timelines:
        raise ValueError("draw_many got no timelines; expected {title: timeline, ...}")
    longest_ns = max(t.end_ns - t.start_ns for t in timelines.values())
    peaks = (m.peak_bytes for t in timelines.values() for m in t.memory)
    top_bytes = max(peaks, default=0)
    parts = []
    for title, timeline in timelines.items():
        window = (timeline.start_ns, timeline.start_ns + longest_ns)
        panel = Panel(
            timeline,
            title,
            ranks=ranks,
            window=window,
            critical_path=critical_path,
            memory=memory,
            memory_top_bytes=top_bytes,
        )
        parts.append(panel.part())
    return stack(parts)
