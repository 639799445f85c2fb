"""The site: links as they lead from its pages, and what is dead is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """course/site/make_site.py, writing elsewhere."""
    monkeypatch.syspath_prepend(str(ROOT / "course/site"))
    sys.modules.pop("make_site", None)
    import make_site

    monkeypatch.setattr(make_site, "OUT", tmp_path)
    yield make_site
    sys.modules.pop("make_site", None)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("course/index.md", "[a](../README.md)", "[a](../index.md)"),
        ("course/index.md", "[a](nsight.md#top)", "[a](nsight.md#top)"),
        ("README.md", "[a](overlaplab/techniques)", "a"),
        ("README.md", "[a](https://pytorch.org) [b](#c)", None),
    ],
)
def test_a_link_leads_where_the_site_has_its_target(
    site: Any, path: str, text: str, expected: str | None
) -> None:
    assert site.relinked(text, path) == (expected or text)


def test_a_file_that_is_no_page_is_copied(site: Any, tmp_path: Path) -> None:
    assert site.relinked("[l](LICENSE)", "README.md") == "[l](LICENSE)"
    assert (tmp_path / "source/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_links_that_lead_nowhere_are_found(site: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<p id='here'><a href='#here'></a><a href='#gone'></a><a href='b.html#x'></a>"
        "<a href='https://example.org/none'></a><img src='none.png'>"
    )
    (tmp_path / "b.html").write_text("<a href='a.html#here'></a>")
    assert list(site.dead_links(tmp_path)) == [
        "a.html: #gone",
        "a.html: b.html#x",
        "a.html: none.png",
    ]
    assert not list(site.dead_links(tmp_path / "none"))


def test_solutions_and_verdicts_are_folded(site: Any) -> None:
    cells = site.lesson("labs/00_start.ipynb").cells
    for tag, folded in (("exercise", "hide-input"), ("check", "hide-output")):
        found = [
            cell.metadata["tags"] for cell in cells if tag in cell.metadata["tags"]
        ]
        assert found and all(folded in tags for tags in found)


def test_figures_keep_their_words(site: Any) -> None:
    for cell in site.lesson("labs/00_start.ipynb").cells:
        if any("image/png" in o.get("data", {}) for o in cell.get("outputs", ())):
            assert cell.metadata["mystnb"]["image"]["alt"].strip()
