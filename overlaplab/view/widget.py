"""The live timeline in a notebook: an anywidget, where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from overlaplab.view.scripts import module, style

Message = Mapping[str, Any]


def make_widget(
    content: Mapping[str, Any], on_message: Callable[[Message], None] | None = None
) -> Any | None:
    """A widget of {"config": ..., "state": ...}, None where anywidget is not installed;
    setting `.state` redraws it. `on_message` is called with what the front end sends: a
    knob turned, a setting to keep."""
    try:
        import_module("anywidget")
    except ImportError:
        return None
    widget = _widget_class()(config=content["config"], state=content["state"])
    if on_message is not None:
        widget.on_msg(lambda _, message, __: on_message(message))
    return widget


@cache
def _widget_class() -> Any:
    anywidget: Any = import_module("anywidget")
    traitlets: Any = import_module("traitlets")

    class TimelineWidget(anywidget.AnyWidget):  # type: ignore[misc]
        """Columns travel as bytes, and only when the state changes."""

        _esm = module()
        _css = style()
        config = traitlets.Dict().tag(sync=True)
        state = traitlets.Dict().tag(sync=True)

    return TimelineWidget
