"""The script and the style of the live timeline, put together from their parts.

One text without imports: a notebook takes it as a module, a page has it inside.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from overlaplab.files import html_page

_PARTS = ("data", "layout", "paint", "marks", "timeline", "input", "knobs")

_WIDGET = """
export default {
  render({ model, el }) {
    const root = element("div", "", el);
    const content = { config: model.get("config"), state: model.get("state") };
    const live = new LiveTimeline(root, content, (message) => model.send(message));
    const changed = () => live.update(model.get("state"));
    model.on("change:state", changed);
    return () => {
      model.off("change:state", changed);
      live.destroy();
    };
  },
};
"""
_PAGE = """
for (const data of document.querySelectorAll("script.ol-timeline-data")) {
  const root = document.createElement("div");
  data.replaceWith(root);
  new LiveTimeline(root, JSON.parse(data.textContent), () => {});
}
"""


def module() -> str:
    """The script as an anywidget module."""
    return _script() + _WIDGET


def assets() -> str:
    """The style and the script of a page: once, after its last fragment."""
    return f'<style>{style()}</style>\n<script type="module">{page_script()}</script>\n'


def document(title: str, style: str, body: str) -> str:
    """An HTML page that needs nothing else: no kernel, no network. The title is plain
    text, the body HTML, with fragments of live timelines."""
    return html_page(title, style, body + assets())


def page_script() -> str:
    """The script for a page: brings every timeline on it to life."""
    return _script() + _PAGE


@cache
def style() -> str:
    """The style sheet."""
    return _read("style.css")


@cache
def _script() -> str:
    return "\n".join(_read(f"{part}.js") for part in _PARTS)


def _read(name: str) -> str:
    return (files("overlaplab.view") / "js" / name).read_text(encoding="utf-8")
