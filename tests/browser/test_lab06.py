"""Lab 06 in JupyterLab: a learner turns knobs, and the kernel and the picture agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from tests.browser.conftest import LABS
from tests.browser.jupyter import Jupyter
from tests.browser.live import Live, run_live
from tests.browser.notebook import Notebook

LAB = "06_bucketing.ipynb"
MORE = {
    "shown": "view.show(knobs.timeline, lab.turn(bucket_mib=0), title=['a', 'b'])",
    "after": "print('\\n' * 60)",
}


@pytest.fixture(scope="module")
def folder(server: Jupyter) -> Path:
    """What JupyterLab shows; the lab has a few more cells at its end."""
    lab = nbformat.read(LABS / LAB, as_version=4)
    for name, source in MORE.items():
        lab.cells.append(nbformat.v4.new_code_cell(source, id=name))
    nbformat.write(lab, server.root / LAB)
    return server.root


@pytest.fixture(scope="module")
def lab(browser: Browser, server: Jupyter, folder: Path) -> Iterator[Notebook]:
    """Lab 06, open, and run as far as its knobs need."""
    notebook = Notebook(browser, server, LAB)
    notebook.run("setup")
    run_live(notebook, "knobs")
    yield notebook
    notebook.close()


@pytest.fixture(autouse=True)
def quiet(lab: Notebook) -> Iterator[None]:
    """The page raises nothing and asks nobody but its server."""
    yield
    faults, lab.faults = lab.faults, []
    assert faults == []


@pytest.fixture
def knobs(lab: Notebook) -> Live:
    return Live(lab.cell("knobs"))


def test_a_knob_that_is_dragged_changes_the_timeline(
    lab: Notebook, knobs: Live
) -> None:
    before_ns = knobs.step_ns
    assert before_ns == lab.ask("knobs.timeline.step_ns")

    knobs.drag("bucket_mib", to=0.0)

    settings = lab.ask("knobs.settings")
    assert settings["bucket_mib"] == 0
    assert knobs.knobs == {name: str(value) for name, value in settings.items()}
    assert knobs.step_ns == lab.ask("knobs.timeline.step_ns") != before_ns


def test_arrow_keys_turn_a_knob(lab: Notebook, knobs: Live) -> None:
    values = lab.ask("list(knobs.knobs['latency_us'].values)")
    knobs.press("latency_us", "Home")
    first_ns = knobs.step_ns
    assert lab.ask("knobs.settings['latency_us']") == values[0]

    knobs.press("latency_us", "ArrowRight")
    knobs.press("latency_us", "ArrowRight")

    assert lab.ask("knobs.settings['latency_us']") == values[2]
    assert knobs.step_ns == lab.ask("knobs.timeline.step_ns") > first_ns


def test_a_setting_typed_in_a_cell_moves_the_knobs(lab: Notebook, knobs: Live) -> None:
    layers = lab.ask("knobs.knobs['layers'].values[0]")
    lab.ask(f"(knobs.set(layers={layers}), 'done')[1]")
    assert lab.ask("knobs.settings['layers']") == layers
    expect(knobs.knob("layers")).to_have_attribute("aria-valuetext", str(layers))
    assert knobs.step_ns == lab.ask("knobs.timeline.step_ns")


def test_a_setting_that_is_kept_arrives_in_the_kernel(
    lab: Notebook, knobs: Live
) -> None:
    assert knobs.kept == lab.ask("dict(knobs.kept)") == {}

    knobs.keep("latency")
    knobs.drag("gbyte_per_s", to=1.0)
    knobs.keep("25 MiB loses")

    kept = lab.ask("dict(knobs.kept)")
    assert kept["25 MiB loses"] == lab.ask("knobs.settings")
    assert kept["25 MiB loses"]["gbyte_per_s"] > kept["latency"]["gbyte_per_s"]
    assert knobs.kept.keys() == kept.keys() == {"latency", "25 MiB loses"}


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_timeline_follows_the_theme(
    lab: Notebook, knobs: Live, theme: str, tmp_path: Path
) -> None:
    lab.theme(theme)
    expect(knobs.root).to_have_attribute("data-theme", theme)
    path = tmp_path / "knobs.png"
    lab.picture("knobs", path)
    with Image.open(path) as picture:
        corner = picture.convert("L").getpixel((picture.width - 3, 3))
    assert (corner < 128) == (theme == "dark")


def test_the_still_figure_is_hidden_beside_a_live_one(lab: Notebook) -> None:
    cell = lab.cell("knobs")
    still = cell.locator("img.olt-figure")
    expect(still).to_have_count(1)
    expect(still).to_be_hidden()
    expect(still).to_have_attribute("alt", re.compile("timeline, step .* ms.*lanes "))


def test_the_wheel_scrolls_the_page_until_the_timeline_is_clicked(
    lab: Notebook,
) -> None:
    lab.run("after")
    shown = run_live(lab, "shown")
    window_ns = shown.window_ns
    top = shown.canvas.bounding_box()
    assert top is not None
    mouse = lab.page.mouse

    mouse.move(top["x"] + top["width"] / 2, top["y"] + top["height"] / 2)
    mouse.wheel(0, 40)
    lab.page.wait_for_function(
        "([canvas, y]) => canvas.getBoundingClientRect().y < y",
        arg=[shown.canvas.element_handle(), top["y"]],
    )
    assert shown.window_ns == window_ns

    shown.canvas.click()
    mouse.wheel(0, -200)
    expect(shown.root).not_to_have_attribute("data-window-end-ns", str(window_ns[1]))
    start_ns, end_ns = shown.window_ns
    assert end_ns - start_ns < window_ns[1] - window_ns[0]


def test_without_its_kernel_a_knob_says_so_and_the_stored_figure_is_back(
    lab: Notebook, knobs: Live
) -> None:
    lab.save_and_restart()
    knobs.knob("layers").press("Home")
    knobs.knob("layers").press("End")  # one of the two turns it
    expect(knobs.root).to_have_attribute("data-error", re.compile("kernel"))

    lab.open_again()

    stored = lab.cell("knobs").locator("img.olt-figure")
    expect(stored).to_be_visible()
    wide = stored.evaluate("(image) => image.naturalWidth")  # 0: it has no picture
    assert wide > 500
    # JupyterLab's own words on the widget that is no more.
    lab.faults = [f for f in lab.faults if "widget model not found" not in f]
