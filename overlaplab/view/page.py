"""A timeline as one HTML file that needs nothing else: no kernel, no network.

`fragment` is for pages of one's own: with `assets` once on the page, each fragment
comes to life; without scripts it is the static figure.
"""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from overlaplab.files import write_whole
from overlaplab.timeline import Timeline
from overlaplab.view.arguments import check_timeline
from overlaplab.view.payload import inks, payload, to_json
from overlaplab.view.picture import draw, draw_many
from overlaplab.view.scripts import page_script, style
from overlaplab.view.stacking import Picture

_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 12px; max-width: 1600px; background: #fff; }
@media (prefers-color-scheme: dark) { body { background: #161616; } }
"""


def titles_of(title: str | Sequence[str], beside: Timeline | None) -> tuple[str, ...]:
    """One title a timeline, from one or two."""
    if beside is None:
        if not isinstance(title, str):
            raise ValueError(f"title {title!r}: one timeline has one title, a string")
        return (title,)
    if isinstance(title, str):
        return (title or "first", "second")
    if len(title) != 2:
        raise ValueError(f"title {title!r}: two timelines have two titles")
    return tuple(title)


def content(
    timeline: Timeline, beside: Timeline | None, title: str | Sequence[str]
) -> dict[str, Any]:
    """What the script draws: one or two timelines, and what their inks look like."""
    shown = [timeline] if beside is None else [timeline, beside]
    for each in shown:
        check_timeline(each)
    panels = [
        payload(each, title=name)
        for each, name in zip(shown, titles_of(title, beside), strict=True)
    ]
    return {
        "config": {"inks": inks(), "knobs": [], "keep": []},
        "state": {"panels": panels},
    }


def still(
    timeline: Timeline, beside: Timeline | None, title: str | Sequence[str]
) -> Picture:
    """The same as a static figure, for where no script runs."""
    names = titles_of(title, beside)
    memory = bool(timeline.memory)
    if beside is None:
        figure = draw(timeline, title=names[0], memory=memory)
    else:
        pair = {names[0]: timeline, names[1]: beside}
        if names[0] == names[1]:
            pair = {names[0]: timeline, f"{names[1]} (2)": beside}
        figure = draw_many(pair, memory=memory or bool(beside.memory))
    assert isinstance(figure, Picture)  # no axes were given
    return figure


def fragment(
    timeline: Timeline,
    beside: Timeline | None = None,
    *,
    title: str | Sequence[str] = "",
) -> str:
    """HTML of one live timeline, for a page that has `assets` after it.

    Args:
        timeline: the upper one.
        beside: the lower one, on the same scale.
        title: over it; two for two.
    """
    data = orjson.dumps(to_json(content(timeline, beside, title))).decode()
    # "<" is all that could end the script early or open a comment in it.
    data = data.replace("<", "\\u003c")
    png = base64.b64encode(still(timeline, beside, title).png()).decode("ascii")
    said = html.escape(", ".join(titles_of(title, beside)) or "timeline")
    return (
        f'<script type="application/json" class="ol-timeline-data">{data}</script>\n'
        f'<noscript><img alt="{said}" style="max-width: 100%" '
        f'src="data:image/png;base64,{png}"></noscript>\n'
    )


def assets() -> str:
    """The style and the script, once a page, after its last fragment."""
    return f'<style>{style()}</style>\n<script type="module">{page_script()}</script>\n'


def page(
    timeline: Timeline,
    beside: Timeline | None = None,
    *,
    title: str | Sequence[str] = "",
) -> str:
    """The whole HTML page; see `fragment`."""
    heading = html.escape(" / ".join(t for t in titles_of(title, beside) if t))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading or 'timeline'}</title>\n<style>{_PAGE_STYLE}</style>\n"
        f"</head>\n<body>\n{fragment(timeline, beside, title=title)}{assets()}"
        "</body>\n</html>\n"
    )


def write_page(
    timeline: Timeline,
    path: str | os.PathLike[str],
    beside: Timeline | None = None,
    *,
    title: str | Sequence[str] = "",
) -> Path:
    """Write the page; a reader sees the whole file or the one that was there before.

    Returns:
        The path.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: no folder {path.parent}")
    write_whole(path, page(timeline, beside, title=title).encode())
    return path
