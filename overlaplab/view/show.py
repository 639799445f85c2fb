"""`show`: a timeline to zoom, pan and ask; a figure where nothing interactive runs."""

from __future__ import annotations

from matplotlib.figure import Figure

from overlaplab.timeline import Timeline
from overlaplab.view.picture import draw, draw_many


def show(
    timeline: Timeline, beside: Timeline | None = None, *, title: str = ""
) -> Figure:
    """Show a timeline, or two of them one above the other on one scale.

    Args:
        timeline: the upper one.
        beside: the lower one.
        title: over them.
    """
    if beside is None:
        return draw(timeline, title=title)
    return draw_many({"first": timeline, "second": beside})
