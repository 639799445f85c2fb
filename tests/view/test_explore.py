"""The explorer, by slider and by typing."""

import importlib
import sys

import pytest

from overlaplab.timeline import Timeline
from overlaplab.view import Explorer, Knob, explorer
from overlaplab.view.stacking import Picture
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


def test_moving_a_slider_is_setting_its_knob():
    made = make()
    made._make_sliders()
    made._sliders["latency_us"].value = 1000
    assert made.settings["latency_us"] == 1000


def test_typing_moves_the_sliders_and_retimes_once():
    calls = []

    def counted(**settings):
        calls.append(settings)
        return retime(**settings)

    made = explorer(counted, KNOBS)
    made._make_sliders()
    made.set(per_bucket=4, latency_us=10)
    assert made._sliders["per_bucket"].value == 4
    assert len(calls) == 2  # at the start, and now


def test_a_slider_that_fails_goes_back_and_says_why():
    def sometimes(per_bucket):
        if per_bucket == 4:
            raise RuntimeError("no memory for that")
        return step(per_bucket=per_bucket)

    made = explorer(sometimes, {"per_bucket": ((1, 2, 4), 2, "")})
    made._make_sliders()
    made._sliders["per_bucket"].value = 4
    assert made._sliders["per_bucket"].value == 2
    assert made._message.value == "per_bucket = 4: no memory for that"


def test_without_ipywidgets_the_figure_and_a_hint_are_shown(monkeypatch, capsys):
    shown = []
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    display = importlib.import_module("IPython.display")
    monkeypatch.setattr(display, "display", lambda thing, **_: shown.append(thing))
    make()._ipython_display_()
    assert [type(thing) for thing in shown] == [Picture]
    assert "knobs.set(per_bucket=2)" in capsys.readouterr().out


def images(cell):
    data = [output.get("data", {}) for output in cell.outputs]
    return [d["image/png"] for d in data if "image/png" in d]


def test_a_stored_notebook_keeps_the_last_figure_beside_the_sliders():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "from tests.view.test_explore import make\nexplorer = make()\nexplorer",
        "explorer.set(latency_us=1000)",
    ]
    code = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=code)
    nbclient.NotebookClient(notebook, timeout=60).execute()
    shown, typed = notebook.cells
    kinds = [set(output.get("data", {})) for output in shown.outputs]
    assert {"application/vnd.jupyter.widget-view+json", "text/plain"} in kinds
    # Turning a knob redraws the figure that is on the page, where it stands.
    assert images(shown) == images(typed) != []


def test_its_repr_is_what_one_would_type():
    assert repr(make()).startswith("<Explorer per_bucket=2, latency_us=100: step ")
    assert isinstance(make(), Explorer)
    assert isinstance(make().timeline, Timeline)
