"""The page in a real browser: keys, pointer, themes, and how fast it draws."""

from __future__ import annotations

import statistics

import pytest

from overlaplab.timeline import Memory, Span, Timeline
from overlaplab.view.colors import COLORS
from overlaplab.view.downsampling import rectangles
from overlaplab.view.units import format_bytes, format_ns
from tests.view.many import many
from tests.view.steps import step

FRAME_MS = 16.0


class Page:
    """A saved timeline, open: `[name]` is the data attribute of that name."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.faults = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.faults.append(request.url))
        self.page.goto(path.as_uri())
        self.faults.remove(path.as_uri())
        self.root = self.page.locator(".ol-timeline")
        self.page.wait_for_selector(".ol-timeline[data-redraws]")
        self.canvas = self.page.locator("canvas.olt-canvas")

    def __getitem__(self, name):
        # Painting waits for the next frame.
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
        return self.root.get_attribute(f"data-{name}")

    def window(self):
        return int(self["window-start-ns"]), int(self["window-end-ns"])

    def press(self, *keys):
        self.canvas.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def place(self, row, time_ns):
        """Where a row of the layout shows a time, in pixels of the page."""
        box = self.canvas.bounding_box()
        x, y = self.page.evaluate(
            """([row, time]) => {
              const { live } = document.querySelector(".ol-timeline");
              const rows = live.scene.rows.filter(({ label }) => label === row.label);
              const { y, height } = rows[row.number];
              const x = live.painter.x(time) / live.painter.ratio;
              return [x, y + height * 0.4 - live.scene.scroll];
            }""",
            [row, time_ns],
        )
        return box["x"] + x, box["y"] + y

    def hover(self, label, time_ns, number=0):
        place = self.place({"label": label, "number": number}, time_ns)
        self.page.mouse.move(*place)
        return place


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a timeline as a saved page; at the end nothing went wrong or online."""
    pages = []

    def open_it(timeline, beside=None, title="", **options):
        path = timeline.save_html(tmp_path / "page.html", beside, title=title)
        pages.append(Page(browser, path, **options))
        return pages[-1]

    yield open_it
    for page in pages:
        faults = page.faults
        page.context.close()
        assert faults == []


def middle(span):
    return (span.start_ns + span.end_ns) / 2


def test_the_page_says_what_it_shows(opened):
    timeline = step(ranks=2)
    page = opened(timeline, title="two ranks")
    assert page["spans"] == str(len(timeline.spans))
    assert page["step-ns"] == str(timeline.step_ns)
    assert page.window() == (0, timeline.end_ns - timeline.start_ns)
    label = page.canvas.get_attribute("aria-label")
    assert f"two ranks: step {format_ns(timeline.step_ns)}" in label


def test_keys_zoom_pan_and_fit(opened):
    page = opened(step())
    start_ns, end_ns = page.window()
    page.press("+")
    zoomed = page.window()
    assert zoomed[1] - zoomed[0] == pytest.approx((end_ns - start_ns) / 1.5, abs=2)
    assert sum(zoomed) == pytest.approx(start_ns + end_ns, abs=2)
    page.press("ArrowRight")
    panned = page.window()
    assert panned[0] - zoomed[0] == pytest.approx((zoomed[1] - zoomed[0]) / 10, abs=2)
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0], abs=2)
    page.press(*["ArrowRight"] * 30)
    assert page.window()[1] == end_ns  # not past the end
    page.press("0")
    assert page.window() == (start_ns, end_ns)


def test_the_wheel_zooms_around_the_pointer_and_only_after_a_click(opened):
    timeline = step()
    page = opened(timeline)
    whole = page.window()
    kernel = next(s for s in timeline.spans if s.name == "mm")
    page.hover("default", middle(kernel))
    page.page.mouse.wheel(0, -240)
    assert page.window() == whole
    place = page.hover("default", middle(kernel))
    page.page.mouse.click(*place)
    page.page.mouse.wheel(0, -240)
    page.page.wait_for_function(
        "end => document.querySelector('.ol-timeline').dataset.windowEndNs < end",
        arg=whole[1],
    )
    assert page.place({"label": "default", "number": 0}, middle(kernel)) == (
        pytest.approx(place, abs=1)
    )


def test_hovering_a_message_shows_all_of_it(opened):
    sent = Span(
        0, "comm", "communication", "all_reduce", 20_000, 60_000, bytes=2**20,
        attributes={
            "label": "bucket 2", "step": 3, "ready_ns": 25_000, "latency_ns": 5_000,
            "alone_ns": 30_000,
        },
    )  # fmt: skip
    computed = Span(0, "default", "compute", "mm", 0, 50_000)
    timeline = Timeline.of([sent, computed])
    page = opened(timeline)
    page.hover("comm", 40_000)
    assert page["hover"] == str(timeline.spans.index(sent))
    assert page.page.locator(".olt-tip").inner_text().splitlines() == [
        "all_reduce",
        "rank 0, comm: communication",
        "starts at 20 us, takes 40 us (alone 30 us)",
        "hidden 30 us, exposed 10 us",
        "waits for peers 5 us, latency 5 us, wire 30 us",
        "1 MiB, 29.96 GB/s",
        "bucket 2, step 3",
    ]
    page.page.mouse.move(5, 5)
    assert page["hover"] == ""
    assert page.page.locator(".olt-tip").is_hidden()


def test_a_click_chooses_a_span_and_shows_the_chain_of_its_causes(opened):
    timeline = step()
    page = opened(timeline)
    index = max(i for i, s in enumerate(timeline.spans) if s.kind == "communication")
    place = page.hover("comm", middle(timeline.spans[index]))
    page.page.mouse.click(*place)
    assert page["selected"] == str(index)
    causes = page.page.locator(".olt-chain button")
    cause = timeline.causes[index]
    assert causes.first.inner_text().startswith(timeline.spans[cause].name)
    causes.first.click()
    assert page["selected"] == str(cause)
    page.press("Escape")
    assert page["selected"] == ""


def test_keys_walk_along_a_lane_and_to_the_next(opened):
    timeline = step()
    page = opened(timeline)
    page.press("ArrowDown", "ArrowDown")
    first = int(page["selected"])
    assert timeline.spans[first].lane == "default"
    page.press("]")
    lane = [i for i, s in enumerate(timeline.spans) if s.lane == "default"]
    second = lane[lane.index(first) + 1]
    assert page["selected"] == str(second)
    page.press("Enter")
    start_ns, end_ns = page.window()
    span = timeline.spans[second]
    assert end_ns - start_ns == pytest.approx(3 * span.duration_ns, abs=2)
    assert (start_ns + end_ns) / 2 == pytest.approx(middle(span), abs=2)


def test_ranks_fold_by_click_and_by_key(opened):
    page = opened(step(ranks=2))
    box = page.canvas.bounding_box()
    row = page.page.evaluate(
        """() => document.querySelector(".ol-timeline").live.scene.rows
             .find((each) => each.type === "rank" && each.rank === 1).y"""
    )
    page.page.mouse.click(box["x"] + 20, box["y"] + row + 8)
    assert page["folded"] == "1"
    lower = page.canvas.bounding_box()["height"]
    assert lower < box["height"]
    page.press("a")
    assert page["folded"] == ""
    page.press("a")
    assert page["folded"] == "0 1"
    assert page.canvas.bounding_box()["height"] < lower


def test_many_ranks_start_folded_but_the_first(opened):
    page = opened(step(ranks=16))
    folded = page["folded"].split()
    assert "0" not in folded
    assert len(folded) >= 8


def test_the_critical_path_and_memory_can_be_hidden(opened):
    timeline = Timeline(
        (Span(0, "default", "compute", "mm", 0, 1000),),
        memory=(Memory(0, ((0, 2**20), (500, 0))),),
    )
    page = opened(timeline)
    page.hover("memory", 300)
    assert page.page.locator(".olt-tip").inner_text().startswith("1 MiB")
    tall = page.canvas.bounding_box()["height"]
    page.press("m", "c")
    assert (page["memory"], page["path"]) == ("false", "false")
    assert page.canvas.bounding_box()["height"] < tall


def test_two_timelines_share_one_window(opened):
    short, long = step(), step(plan="serial")
    page = opened(short, long, title=("buckets", "serial"))
    assert page["panels"] == "2"
    assert page.window() == (0, max(short.step_ns, long.step_ns))
    place = page.hover("comm", middle(long.spans[-3]), number=1)
    page.page.mouse.click(*place)
    assert page["selected-panel"] in ("1", "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_has_the_theme_of_the_system(opened, scheme):
    page = opened(step(), color_scheme=scheme)
    assert page["theme"] == scheme
    paper = page.root.evaluate("(root) => getComputedStyle(root).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 22)"}[scheme]


def test_a_narrow_page_scrolls_nowhere(opened):
    page = opened(step(ranks=2), title="a long title " * 5, viewport={
        "width": 420, "height": 700,
    })  # fmt: skip
    wide = page.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 420


def test_a_sharp_screen_gets_as_many_pixels_as_it_has(opened):
    page = opened(step(), device_scale_factor=2)
    box = page.canvas.bounding_box()
    assert page.canvas.evaluate("(canvas) => canvas.width") == round(2 * box["width"])


def test_hostile_names_are_shown_as_they_are(opened):
    name = '</script><img src=x onerror="document.title=1"><!--'
    timeline = Timeline.of([Span(0, "default", "compute", name, 0, 100)])
    page = opened(timeline, title=name)
    page.hover("default", 50)
    assert page.page.locator(".olt-tip strong").inner_text() == name
    assert page.page.title() == name


def test_an_empty_timeline_is_drawn(opened):
    page = opened(Timeline(()))
    assert page["spans"] == "0"
    page.press("+", "ArrowDown", "]", "r", "a", "Enter")


def test_numbers_read_as_in_the_figures(opened):
    page = opened(step())
    values = [0, 1, 999, 1234, 64_100, 1_234_567, 98_765_432_1]
    shown = page.page.evaluate(
        "(values) => { const live = document.querySelector('.ol-timeline').live;"
        " return values.map((v) => [live.words.ns(v), live.words.bytes(v)]); }",
        values,
    )
    assert shown == [[format_ns(v), format_bytes(v)] for v in values]


GATHER = """([lane, columns]) => {
  const { live } = document.querySelector(".ol-timeline");
  const [panel] = live.panels;
  const found = [];
  live.painter.gatherer.gather(panel.tracks[lane], 0, panel.length_ns, columns,
    (color, left, right, whole) => found.push([color, left, right, whole]));
  return found;
}"""


@pytest.mark.parametrize("columns", [64, 1024])
def test_spans_narrower_than_a_pixel_are_gathered_as_in_the_figures(opened, columns):
    # A power of two long, so that both sides' arithmetic is exact.
    whole_ns = 2**22
    spans = [s for s in many(1200, 1).spans if s.end_ns < whole_ns]
    marks = [Span(0, "cpu", "host", "mark", at, at) for at in (0, whole_ns)]
    timeline = Timeline.of([*spans, *marks])
    page = opened(timeline)
    column_ns = whole_ns / columns
    for number, lane in enumerate(timeline.lanes(0)):
        drawn = rectangles(
            (s for s in timeline.spans if s.lane == lane), 0, whole_ns, columns
        )
        expected = [
            [list(COLORS).index(p.color), p.start_ns / column_ns, p.end_ns / column_ns,
             p.whole]
            for p in drawn
        ]  # fmt: skip
        found = page.page.evaluate(GATHER, [number, columns])
        assert len(found) > 5
        assert sorted(found) == sorted(expected)


REDRAW = """() => {
  const { live } = document.querySelector(".ol-timeline");
  const context = live.canvas.getContext("2d");
  const times = [];
  for (const zoom of [1, 0.7, 0.4, 0.2, 0.1, 0.03, 0.01, 0.003]) {
    for (let k = 0; k < 13; k++) {
      const length = live.length * zoom;
      const start = ((live.length - length) * k) / 12;
      live.show(start, start + length);
      const began = performance.now();
      live.paint();
      context.getImageData(0, 0, 1, 1); // wait until it is really drawn
      times.push(performance.now() - began);
    }
  }
  return times;
}"""


@pytest.mark.parametrize(("num_spans", "limit_ms"), [(10_000, FRAME_MS), (50_000, 50)])
def test_a_redraw_takes_less_than_a_frame(opened, num_spans, limit_ms):
    page = opened(many(num_spans), viewport={"width": 1200, "height": 900})
    assert int(page["spans"]) > 0.99 * num_spans
    # The best of each redraw in a few rounds: other work on the machine is not ours to
    # measure.
    best = page.page.evaluate(REDRAW)
    for _ in range(30):
        if statistics.median(best) < limit_ms:
            break
        best = [min(two) for two in zip(best, page.page.evaluate(REDRAW), strict=True)]
    assert statistics.median(best) < limit_ms, best
