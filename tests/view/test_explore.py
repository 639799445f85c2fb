"""The explorer, by live knobs and by typing."""

import importlib
import itertools
import sys

import pytest

from overlaplab.timeline import Timeline
from overlaplab.view import Explorer, Knob, explorer
from overlaplab.view.stacking import Picture
from overlaplab.view.widget import make_widget
from tests.guards import GUARD_S
from tests.view.steps import step

KNOBS = {
    "per_bucket": Knob((1, 2, 4), 2, "bucket (layers)"),
    "latency_us": ((10, 100, 1000), 100, ""),
}


def retime(per_bucket, latency_us):
    return step(per_bucket=per_bucket, latency_ns=latency_us * 1000)


def make(**kwargs):
    return explorer(retime, KNOBS, **kwargs)


def test_it_starts_with_the_defaults():
    made = make()
    assert made.settings == {"per_bucket": 2, "latency_us": 100}
    assert made.timeline == retime(2, 100)


def test_typing_a_setting_retimes_and_returns_the_new_figure():
    made = make()
    figure = made.set(latency_us=1000)
    assert isinstance(figure, Picture)
    assert made.settings == {"per_bucket": 2, "latency_us": 1000}
    assert made.timeline == retime(2, 1000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": 2}, r"no knob 'bucket'; there are \['per_bucket', 'latency_us'\]"),
        ({"latency_us": 11}, r"no value 11; expected one of \[10, 100, 1000\]"),
    ],
)
def test_a_knob_or_value_that_is_not_there_changes_nothing(settings, message):
    made = make()
    with pytest.raises(ValueError, match=message):
        made.set(**settings)
    assert made.settings == {"per_bucket": 2, "latency_us": 100}


def test_a_default_outside_its_values_is_refused():
    with pytest.raises(ValueError, match="default 3 is not among"):
        explorer(retime, {"per_bucket": ((1, 2), 3, "")})
    with pytest.raises(ValueError, match="no knobs"):
        explorer(retime, {})


def test_settings_are_a_copy():
    made = make()
    made.settings["latency_us"] = 1
    assert made.settings["latency_us"] == 100


def test_kept_settings_stay_when_knobs_turn():
    made = make()
    assert made.keep("latency bound") == {"per_bucket": 2, "latency_us": 100}
    made.set(latency_us=10)
    made.keep("wire bound")
    assert dict(made.kept) == {
        "latency bound": {"per_bucket": 2, "latency_us": 100},
        "wire bound": {"per_bucket": 2, "latency_us": 10},
    }
    assert [t.get_text() for t in made.figure().axes[1].get_yticklabels()] == [
        "now",
        "latency bound",
        "wire bound",
    ]


def test_a_what_if_says_which_part_of_the_step_it_saves():
    half = {"half the latency": lambda s: {"latency_us": s["latency_us"] // 2}}
    made = make(what_if=half)
    made.set(latency_us=1000)
    now, then = retime(2, 1000).step_ns, retime(2, 500).step_ns
    assert made.savings() == {"half the latency": 1 - then / now}
    remark = f"half the latency saves {100 * (1 - then / now):.1f} %"
    assert remark in [t.get_text() for t in made.figure().axes[1].texts]


def test_if_retiming_fails_settings_and_timeline_stay():
    def sometimes(per_bucket):
        if per_bucket == 4:
            raise RuntimeError("no memory for that")
        return step(per_bucket=per_bucket)

    made = explorer(sometimes, {"per_bucket": ((1, 2, 4), 2, "")})
    with pytest.raises(RuntimeError, match="no memory"):
        made.set(per_bucket=4)
    assert made.settings == {"per_bucket": 2}
    assert made.timeline == step(per_bucket=2)


def live(made):
    """Shown, its widget beside it, and a front end's hand on it."""
    pytest.importorskip("anywidget")
    made._widget = make_widget(made._content(), made._asked)
    numbers = itertools.count(1)

    def ask(**message):
        made._asked({"serial": next(numbers), **message})

    return made._widget, ask


def test_turning_a_knob_sets_it_and_the_front_end_hears_of_it():
    made = make()
    widget, ask = live(made)
    ask(type="turn", settings={"per_bucket": 1, "latency_us": 2})
    assert made.settings == {"per_bucket": 2, "latency_us": 1000}
    assert widget.state["settings"] == {"per_bucket": 1, "latency_us": 2}
    assert widget.state["serial"] == 1
    assert widget.state["panels"][0]["step_ns"] == retime(2, 1000).step_ns


def test_typing_moves_the_live_knobs_and_retimes_once():
    calls = []

    def counted(**settings):
        calls.append(settings)
        return retime(**settings)

    made = explorer(counted, KNOBS)
    widget, _ = live(made)
    made.set(per_bucket=4, latency_us=10)
    assert widget.state["settings"] == {"per_bucket": 2, "latency_us": 0}
    assert len(calls) == 2  # at the start, and now


def test_a_knob_that_fails_goes_back_and_says_why():
    def sometimes(per_bucket):
        if per_bucket == 4:
            raise RuntimeError("no memory for that")
        return step(per_bucket=per_bucket)

    made = explorer(sometimes, {"per_bucket": ((1, 2, 4), 2, "")})
    widget, ask = live(made)
    ask(type="turn", settings={"per_bucket": 2})
    assert widget.state["settings"] == {"per_bucket": 1}
    assert widget.state["error"] == "RuntimeError: no memory for that"
    ask(type="turn", settings={"per_bucket": 0})
    assert widget.state["error"] == ""


def test_a_button_keeps_the_setting_under_the_name_that_a_question_wants():
    made = make(keep=("latency", "neither"))
    widget, ask = live(made)
    assert widget.config["keep"] == ["latency", "neither"]
    ask(type="turn", settings={"per_bucket": 1, "latency_us": 2})
    ask(type="keep", name="latency")
    ask(type="turn", settings={"per_bucket": 0, "latency_us": 2})
    assert dict(made.kept) == {"latency": {"per_bucket": 2, "latency_us": 1000}}
    assert widget.state["kept"] == {"latency": "per_bucket 2, latency_us 1000"}
    assert [bar["name"] for bar in widget.state["bars"]] == ["now", "latency"]


def test_the_shares_of_a_live_bar_are_those_of_the_critical_path():
    made = make()
    widget, _ = live(made)
    path = made.timeline.critical_path()
    shares = widget.state["bars"][0]["shares"]
    assert {s["share"]: s["fraction"] for s in shares} == dict(path.shares)
    assert sum(s["percent"] for s in shares) == 100


def test_without_anywidget_the_figure_and_a_hint_are_shown(monkeypatch):
    shown = []
    monkeypatch.setitem(sys.modules, "anywidget", None)
    display = importlib.import_module("IPython.display")
    monkeypatch.setattr(display, "display", lambda thing, **_: shown.append(thing))
    make()._ipython_display_()
    figure, hint = shown
    assert isinstance(figure, Picture)
    assert "knobs.set(per_bucket=2)" in hint.data


def images(cell):
    data = [output.get("data", {}) for output in cell.outputs]
    return [d["image/png"] for d in data if "image/png" in d]


def test_a_stored_notebook_keeps_the_last_figure_beside_the_knobs():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "from tests.view.test_explore import make\nexplorer = make()\nexplorer",
        "explorer.set(latency_us=1000)",
    ]
    code = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=code)
    nbclient.NotebookClient(
        notebook, timeout=GUARD_S, startup_timeout=GUARD_S
    ).execute()
    shown, typed = notebook.cells
    kinds = [set(output.get("data", {})) for output in shown.outputs]
    assert {"application/vnd.jupyter.widget-view+json", "text/plain"} in kinds
    # Turning a knob redraws the figure that is on the page, where it stands.
    assert images(shown) == images(typed) != []


def test_its_repr_is_what_one_would_type():
    assert repr(make()).startswith("<Explorer per_bucket=2, latency_us=100: step ")
    assert isinstance(make(), Explorer)
    assert isinstance(make().timeline, Timeline)
