"""`show`: a timeline to zoom, pan and ask; a figure where nothing interactive runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from overlaplab.timeline import Timeline
from overlaplab.view.arguments import check_timeline
from overlaplab.view.page import content, still, titles_of, write_page
from overlaplab.view.stacking import Picture
from overlaplab.view.widget import make_widget


def show(
    timeline: Timeline,
    beside: Timeline | None = None,
    *,
    title: str | Sequence[str] = "",
) -> Shown:
    """A live timeline, or two of them one above the other on one scale.

    As the last line of a cell it shows itself: the wheel zooms (after a click), drag
    pans, a click on a span says what it waited for, "?" lists the keys. A figure is
    stored beside it for readers without a kernel; JupyterLab shows one of the two.

    Args:
        timeline: the upper one.
        beside: the lower one; each starts at its own first span.
        title: over it; two for two.
    """
    return Shown(timeline, beside, title=title)


class Shown:
    """See `show`."""

    def __init__(
        self,
        timeline: Timeline,
        beside: Timeline | None = None,
        *,
        title: str | Sequence[str] = "",
    ) -> None:
        check_timeline(timeline)
        if beside is not None:
            check_timeline(beside)
        titles_of(title, beside)
        self.timeline, self.beside, self.title = timeline, beside, title

    def figure(self) -> Picture:
        """The same, still."""
        return still(self.timeline, self.beside, self.title)

    def widget(self) -> Any | None:
        """A new widget of it, None without anywidget."""
        return make_widget(content(self.timeline, self.beside, self.title))

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write it as one file that needs neither kernel nor network."""
        return write_page(self.timeline, path, self.beside, title=self.title)

    def __repr__(self) -> str:
        pair = "" if self.beside is None else f" beside {len(self.beside.spans)} spans"
        return (
            f"<timeline of {len(self.timeline.spans)} spans{pair}; save_html writes it>"
        )

    def _ipython_display_(self) -> None:
        """The widget and, right after it, the figure: the style sheet hides the second
        in a live JupyterLab, and it is what a stored notebook shows.
        """
        display: Any = import_module("IPython.display").display
        widget = self.widget()
        if widget is not None:
            display(widget)
        display(self.figure())
