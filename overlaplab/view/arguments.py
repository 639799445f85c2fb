"""What figures, texts and tables are made of, checked."""

from __future__ import annotations

from collections.abc import Mapping

from overlaplab.timeline import Timeline


def check_timeline(timeline: object) -> None:
    """Raise TypeError, with what to do about a run, if it is no timeline."""
    if isinstance(timeline, Timeline):
        return
    hint = ""
    if isinstance(getattr(timeline, "timeline", None), Timeline):
        hint = "; pass its .timeline"
    raise TypeError(f"expected a Timeline, got a {type(timeline).__name__}{hint}")


def check_timelines(timelines: object) -> None:
    """Raise TypeError if it is no mapping of names to timelines."""
    if not isinstance(timelines, Mapping):
        raise TypeError(
            f"expected {{name: timeline, ...}}, got a {type(timelines).__name__}"
        )
    for timeline in timelines.values():
        check_timeline(timeline)
