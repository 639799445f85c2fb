"""One HTML file that needs nothing else, whatever the names of its spans."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from overlaplab.timeline import Span, Timeline
from overlaplab.view import show
from overlaplab.view.scripts import assets, module, page_script
from tests.view.steps import step

HOSTILE = '</script><script>alert(1)</script><!-- "&\u2028'


class Elements(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag == "script":
            self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


def hostile():
    spans = [Span(0, HOSTILE, "compute", HOSTILE, 0, 10, attributes={"label": HOSTILE})]
    return Timeline.of(spans)


def test_a_page_loads_nothing_from_anywhere():
    text = show(step(ranks=2), step(), title=("a", "b")).page()
    for tag, attributes in Elements(text).found:
        assert tag not in ("link", "iframe", "object")
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "http://" not in text
    assert "https://" not in text
    assert not re.search(r"\b(fetch|import)\s*\(|XMLHttpRequest|@import", text)


def test_names_of_spans_stay_data():
    text = show(hostile(), title=HOSTILE).page()
    elements = Elements(text)
    assert [tag for tag, _ in elements.found].count("script") == 2
    data = json.loads(elements.scripts[0])
    (panel,) = data["state"]["panels"]
    assert panel["title"] == HOSTILE
    assert panel["strings"] == ["", HOSTILE]
    assert panel["lanes"] == [[0, HOSTILE]]
    assert "<!--" not in text


def test_without_scripts_the_page_is_the_static_figure():
    elements = Elements(show(step(), title="a step").fragment())
    images = [attributes for tag, attributes in elements.found if tag == "img"]
    assert [tag for tag, _ in elements.found] == ["script", "noscript", "img"]
    kind, encoded = (images[0]["src"] or "").split(",", 1)
    assert kind == "data:image/png;base64"
    assert base64.b64decode(encoded).startswith(b"\x89PNG")
    assert (images[0]["alt"] or "").startswith("a step: timeline, step 15.91 ms")


def test_fragments_share_one_script():
    assert "class LiveTimeline" not in show(step()).fragment()
    assert assets().count("class LiveTimeline") == 1


def test_the_script_of_a_page_and_of_a_notebook_are_one():
    common = len("\n".join(page_script().splitlines()[:-6]))
    assert module()[:common] == page_script()[:common]
    assert "export default" in module()
    assert "export" not in page_script()


def test_nothing_in_script_or_style_ends_its_element():
    assert "</" not in page_script()
    assert assets().count("</style>") == 1


def test_save_html_writes_the_page_and_returns_its_path(tmp_path):
    path = tmp_path / "step.html"
    assert step().save_html(path, title="t") == path
    assert path.read_text() == show(step(), title="t").page()
    assert [each.name for each in tmp_path.iterdir()] == ["step.html"]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = show(step()).save_html(tmp_path / "step.html")
    before = path.read_text()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("overlaplab.files.os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        step(ranks=2).save_html(path)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["step.html"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing"):
        step().save_html(tmp_path / "missing" / "step.html")


def test_what_is_no_timeline_is_refused(tmp_path):
    with pytest.raises(TypeError, match="expected a Timeline, got a str"):
        step().save_html(tmp_path / "x.html", "not a timeline")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("beside", "title", "message"),
    [
        (None, ("a", "b"), "one timeline has one title"),
        (step(), ("a", "b", "c"), "two timelines have two titles"),
    ],
)
def test_titles_are_as_many_as_timelines(beside, title, message):
    with pytest.raises(ValueError, match=message):
        show(step(), beside, title=title).page()


def test_an_empty_timeline_is_a_page_too():
    assert Elements(show(Timeline(())).page()).found
