"""`show`: a timeline to zoom, pan and ask; a figure where nothing interactive runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from overlaplab.files import write_whole
from overlaplab.timeline import Timeline
from overlaplab.view.arguments import check_timeline
from overlaplab.view.payload import colors, payload, to_json
from overlaplab.view.picture import draw, draw_many
from overlaplab.view.scripts import document
from overlaplab.view.stacking import Picture
from overlaplab.view.widget import make_widget

_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 12px; max-width: 1600px; background: #fff; }
@media (prefers-color-scheme: dark) { body { background: #161616; } }
"""


class Shown:
    """A live timeline, or two of them one above the other on one scale.

    As the last line of a cell it shows itself: the wheel zooms (after a click), drag
    pans, a click on a span says what it waited for, "?" lists the keys. A figure is
    stored beside it for readers without a kernel; JupyterLab shows one of the two.

    Args:
        timeline: the upper one.
        beside: the lower one; each starts at its own first span.
        title: over it; two for two.
    """

    def __init__(
        self,
        timeline: Timeline,
        beside: Timeline | None = None,
        *,
        title: str | Sequence[str] = "",
    ) -> None:
        self.timelines = [timeline] if beside is None else [timeline, beside]
        for each in self.timelines:
            check_timeline(each)
        self.titles = _titles(title, len(self.timelines))

    def content(self) -> dict[str, Any]:
        """What the script draws: the timelines, and what their colors look like."""
        pairs = zip(self.timelines, self.titles, strict=True)
        panels = [payload(timeline, title=title) for timeline, title in pairs]
        return {
            "config": {"colors": colors(), "knobs": [], "keep": []},
            "state": {"panels": panels},
        }

    def figure(self) -> Picture:
        """The same, still."""
        memory = any(timeline.memory for timeline in self.timelines)
        first, *second = self.titles
        if second:
            names = first, second[0] if second[0] != first else f"{first} (2)"
            pair = dict(zip(names, self.timelines, strict=True))
            return draw_many(pair, memory=memory)
        return draw(self.timelines[0], title=first, memory=memory)

    def widget(self) -> Any | None:
        """A new widget of it, None without anywidget."""
        return make_widget(self.content())

    def fragment(self) -> str:
        """HTML for a page of one's own that has `scripts.assets` after it.

        Without scripts it is the static figure.
        """
        data = orjson.dumps(to_json(self.content())).decode()
        # "<" is all that could end the script early or open a comment in it.
        data = data.replace("<", "\\u003c")
        return (
            '<script type="application/json" class="ol-timeline-data">'
            f"{data}</script>\n"
            f"<noscript>{self.figure().html()}</noscript>\n"
        )

    def page(self) -> str:
        """The whole of an HTML page that needs nothing else: no kernel, no network."""
        heading = " / ".join(title for title in self.titles if title)
        return document(heading or "timeline", _PAGE_STYLE, self.fragment())

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page; a reader sees the whole file or the one that was before.

        Returns:
            The path.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        return write_html(path, self.page)

    def __repr__(self) -> str:
        first, *second = (len(timeline.spans) for timeline in self.timelines)
        pair = f" beside {second[0]} spans" if second else ""
        return f"<timeline of {first} spans{pair}; save_html writes it>"

    def _ipython_display_(self) -> None:
        """The widget and, right after it, the figure: the style sheet hides the second
        in a live JupyterLab, and it is what a stored notebook shows.
        """
        display: Any = import_module("IPython.display").display
        widget = self.widget()
        if widget is not None:
            display(widget)
        display(self.figure())


show = Shown


def write_html(path: str | os.PathLike[str], make: Callable[[], str]) -> Path:
    """Write a page, made once its folder is known to exist; see `Shown.save_html`."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: no folder {path.parent}")
    write_whole(path, make().encode("utf-8", "replace"))
    return path


def _titles(title: str | Sequence[str], num_timelines: int) -> tuple[str, ...]:
    """One title a timeline, from one or two."""
    if num_timelines == 1:
        if not isinstance(title, str):
            raise ValueError(f"title {title!r}: one timeline has one title, a string")
        return (title,)
    if isinstance(title, str):
        return (title or "first", "second")
    if len(title) != 2:
        raise ValueError(f"title {title!r}: two timelines have two titles")
    return tuple(title)
