"""Knobs in a real browser, without a notebook: an explorer answers what they ask."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from overlaplab.view import Explorer, Knob, show
from overlaplab.view.payload import to_json
from overlaplab.view.scripts import assets
from tests.view.steps import step

KNOBS = {
    "per_bucket": Knob((1, 2, 4), 2, "bucket (layers)"),
    "latency_us": Knob((10, 100, 1000), 100, "latency (us)"),
}
# A page's script keeps its class to itself; a timeline on the page has it.
MOUNT = """(content) => {
  const { constructor } = document.querySelector(".ol-timeline").live;
  const root = document.createElement("div");
  document.body.replaceChildren(root);
  window.asked = [];
  window.hold = false;
  const live = new constructor(root, content, (message) => {
    if (window.gone) throw new Error("Cannot send");
    window.asked.push(message);
    window.answer(message).then((state) => state && live.update(state));
  });
}"""


def retime(per_bucket, latency_us):
    if per_bucket == 4:
        raise RuntimeError("no memory for that")
    return step(per_bucket=per_bucket, latency_ns=latency_us * 1000)


class Bench:
    """An explorer, its knobs on a page, and the wire between them."""

    def __init__(self, browser, tmp_path):
        self.explorer = Explorer(retime, KNOBS, keep=("latency", "neither"))
        self.explorer._widget = SimpleNamespace(state=None)
        path = tmp_path / "knobs.html"
        path.write_text(f"<!doctype html><body>{show(step()).fragment()}{assets()}")
        self.page = browser.new_page()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".ol-timeline[data-redraws]")
        self.page.expose_function("answer", self.answer)
        self.page.evaluate(MOUNT, to_json(self.explorer._content()))
        self.root = self.page.locator(".ol-timeline")

    def answer(self, message):
        if message["type"] == "rest":
            return None
        self.explorer._asked(message)
        return to_json(self.explorer._widget.state)

    def knob(self, name):
        return self.page.locator(f'[data-knob="{name}"]')

    def settled(self):
        self.page.wait_for_selector('.ol-timeline[data-busy="false"]')
        return json.loads(self.root.get_attribute("data-knobs"))


@pytest.fixture
def bench(browser, tmp_path):
    made = Bench(browser, tmp_path)
    yield made
    made.page.close()


def test_an_arrow_key_turns_a_knob_and_the_timeline_follows(bench):
    bench.page.evaluate(
        "document.addEventListener('keydown', (e) => { window.bubbled = e.key })"
    )
    bench.knob("latency_us").press("ArrowRight")
    assert bench.settled() == {"per_bucket": "2", "latency_us": "1000"}
    assert bench.explorer.settings == {"per_bucket": 2, "latency_us": 1000}
    shown = bench.root.get_attribute("data-step-ns")
    bench.page.wait_for_function(
        "ns => document.querySelector('.ol-timeline').dataset.stepNs === ns",
        arg=str(retime(2, 1000).step_ns),
    )
    assert shown is not None
    # JupyterLab would move to another cell.
    assert bench.page.evaluate("window.bubbled") is None


def test_a_knob_at_its_end_asks_for_nothing(bench):
    bench.knob("latency_us").press("End")
    bench.settled()
    asked = bench.page.evaluate("window.asked.length")
    bench.knob("latency_us").press("ArrowRight")
    assert bench.page.evaluate("window.asked.length") == asked


def test_while_an_answer_is_on_its_way_only_the_latest_wish_is_kept(bench):
    bench.page.evaluate(
        """() => {
          const input = document.querySelector('[data-knob="latency_us"]');
          for (const value of [0, 2, 0, 2, 0]) {
            input.value = value;
            input.dispatchEvent(new Event("input"));
          }
        }"""
    )
    bench.page.wait_for_function(
        "window.asked.filter((each) => each.type === 'turn').length === 2"
    )
    assert bench.settled()["latency_us"] == "10"
    turns = bench.page.evaluate("window.asked.filter((each) => each.type === 'turn')")
    assert [turn["settings"]["latency_us"] for turn in turns] == [0, 0]


def test_a_button_keeps_the_setting_and_says_so(bench):
    bench.knob("latency_us").press("ArrowRight")
    bench.settled()
    button = bench.page.locator('[data-keep="latency"]')
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    bench.settled()
    assert button.get_attribute("aria-pressed") == "true"
    assert dict(bench.explorer.kept) == {
        "latency": {"per_bucket": 2, "latency_us": 1000}
    }
    bars = bench.page.locator("canvas.olt-bars").get_attribute("aria-label")
    assert "latency: compute" in bars


def test_an_error_is_shown_and_the_knob_goes_back(bench):
    bench.knob("per_bucket").press("ArrowRight")
    assert bench.settled()["per_bucket"] == "2"
    error = bench.page.locator(".olt-error")
    assert error.inner_text() == "RuntimeError: no memory for that"
    assert bench.knob("per_bucket").input_value() == "1"
    bench.knob("per_bucket").press("ArrowLeft")
    bench.settled()
    assert error.is_hidden()


def test_knobs_without_a_kernel_say_what_to_do(bench):
    bench.page.evaluate("window.gone = true")
    bench.knob("latency_us").press("ArrowLeft")
    error = bench.page.locator(".olt-error").inner_text()
    assert error.endswith("is gone. Run this cell again.")


def test_the_window_stays_where_it_was_zoomed_to(bench):
    bench.page.locator("canvas.olt-canvas").press("+")
    before = bench.page.evaluate(
        "() => { const { live } = document.querySelector('.ol-timeline');"
        " return [live.start, live.end]; }"
    )
    bench.knob("latency_us").press("ArrowRight")
    bench.settled()
    after = bench.page.evaluate(
        "() => { const { live } = document.querySelector('.ol-timeline');"
        " return [live.start, live.end]; }"
    )
    assert after == before
