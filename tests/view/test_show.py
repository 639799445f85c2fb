"""A live timeline and, beside it, the figure for readers without a kernel."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from overlaplab.timeline import Timeline
from overlaplab.view import show
from overlaplab.view.stacking import Picture
from tests.guards import GUARD_S
from tests.view.steps import step


@pytest.fixture
def shown(monkeypatch):
    """What a cell would display, in its order."""
    things = []
    display = importlib.import_module("IPython.display")
    monkeypatch.setattr(display, "display", lambda thing, **_: things.append(thing))
    return things


def test_the_figure_stands_right_after_the_widget(shown):
    pytest.importorskip("anywidget")
    show(step())._ipython_display_()
    widget, figure = shown  # the style sheet hides the picture that follows the widget
    assert widget.state["panels"][0]["step_ns"] == step().step_ns
    assert isinstance(figure, Picture)


def test_without_anywidget_it_is_the_figure(shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    show(step(), step(plan="serial"))._ipython_display_()
    assert [type(thing) for thing in shown] == [Picture]


def test_two_timelines_are_two_panels_with_a_title_each():
    pytest.importorskip("anywidget")
    widget = show(step(), step(plan="serial"), title=("buckets", "serial")).widget()
    assert [panel["title"] for panel in widget.state["panels"]] == ["buckets", "serial"]


def test_two_timelines_of_one_title_are_both_drawn():
    figure = show(step(), step(plan="serial"), title=("step", "step")).figure()
    assert len(figure.axes) == 2


def test_what_it_shows_can_be_saved(tmp_path):
    saved = show(step(), title="t").save_html(tmp_path / "a.html")
    assert (
        saved.read_text()
        == step().save_html(tmp_path / "b.html", title="t").read_text()
    )


def test_what_cannot_be_shown_is_refused_at_once():
    with pytest.raises(TypeError, match="expected a Timeline, got a str"):
        show("a step")
    with pytest.raises(TypeError, match="expected a Timeline, got a dict"):
        show(step(), {})
    with pytest.raises(ValueError, match="two timelines have two titles"):
        show(step(), step(), title=("a", "b", "c"))


def test_an_empty_timeline_shows():
    assert isinstance(show(Timeline(())).figure(), Picture)


def test_a_stored_notebook_has_the_figure_and_no_columns():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cell = nbformat.v4.new_code_cell(
        "from tests.view.steps import step\n"
        "from overlaplab.view import show\n"
        "show(step())"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = nbclient.NotebookClient(
        notebook, timeout=GUARD_S, startup_timeout=GUARD_S, store_widget_state=False
    )
    client.execute()
    (cell,) = notebook.cells
    kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
    assert "image/png" in kinds
    assert "widgets" not in notebook.metadata
    assert "LiveTimeline" not in json.dumps(notebook)
