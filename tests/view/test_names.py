"""Names come from outside: they are text, whatever they contain."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import overlaplab as ol
from overlaplab import cli, view
from overlaplab.cluster.pool.messages import Printed
from overlaplab.cluster.pool.pool import Collection
from overlaplab.errors import TraceError, printable
from overlaplab.timeline import Span, Timeline
from tests.diagnosis.ten_traces import Rank, bucketed, steps

MATHS = ["hip::detail::$_1__impl$", "$x^{$", "a $ b $ c"]


def named(name: str) -> Timeline:
    return Timeline.of(
        [
            Span(0, name, "compute", name, 0, 100_000, attributes={"label": name}),
            Span(0, "comm", "communication", name, 50_000, 150_000),
        ]
    )


@pytest.mark.parametrize("name", MATHS)
def test_a_dollar_is_no_mathematics(name: str):
    for figure in (
        view.draw(named(name), title=name),
        view.draw_many({name: named(name)}),
        view.shares_bar({name: named(name)}),
    ):
        assert figure.png().startswith(b"\x89PNG")


def test_long_names_of_lanes_leave_room_for_the_lanes():
    made = named("L" * 200)
    figure = view.draw(made)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert max(map(len, labels)) == 40 and "..." in "".join(labels)
    assert figure.axes[0].get_position().width > 0.6
    assert max(map(len, view.text(made, width=100).splitlines())) <= 101


def test_markdown_and_escapes_in_names_of_rows_are_text():
    table = view.table({"a|b*c*[x](y)<b>$1$": named("k"), "\x1b[31mred": named("k")})
    assert "| a\\|b\\*c\\*\\[x\\](y)\\<b\\>\\$1\\$ |" in table.markdown()
    assert "\x1b" not in str(table) + table.markdown()
    assert "\\x1b[31mred" in str(table)


def test_messages_escape_what_a_terminal_would_obey(tmp_path: Path):
    path = tmp_path / "\x1b]0;title\x07.json"
    path.write_text("hello")
    with pytest.raises(TraceError) as raised:
        ol.read_trace(path)
    assert "\\x1b]0;title\\x07.json" in str(raised.value)
    answer = CliRunner().invoke(cli.main, ["report", str(tmp_path / "\x1b[2J")])
    assert "\x1b" not in answer.output and "\\x1b[2J" in answer.output
    assert printable("a\tb\nc é 中") == "a\tb\nc é 中"


def test_what_ranks_print_is_escaped_and_bars_show_their_last_state(
    capsys: pytest.CaptureFixture[str],
):
    text = "\x1b[31mred\x1b[0m\n10 %\r100 %\r\nplain"
    Collection._take(Any, 0, Printed(stream="stdout", text=text))  # needs no pool
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] \\x1b[31mred\\x1b[0m",
        "[rank 0] 100 %",
        "[rank 0] plain",
    ]


class Elements(HTMLParser):
    """Every element of a page with the names of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: Counter[tuple[str, ...]] = Counter()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag, *(name for name, _ in attrs)] += 1


HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror='alert(2)'>",
    "' onmouseover='alert(3)",
    "<!--<script>",
    "]]></style></title></svg><svg/onload=alert(4)>",
    "&lt;script&gt;alert(5)",
    "javascript:alert(6)",
]


def everywhere(value: Any, text: str) -> Any:
    """`value` with `text` behind every name in it that is free."""
    if isinstance(value, dict):
        kept = ("ph", "cat")
        return {
            key: of if key in kept else everywhere(of, text)
            for key, of in value.items()
        }
    if isinstance(value, list):
        return [everywhere(of, text) for of in value]
    is_name = isinstance(value, str) and not value.startswith("ProfilerStep")
    return f"{value}{text}" if is_name else value


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_trace_becomes_an_element_of_the_page(text: str, tmp_path: Path):
    """Names of kernels, operators, ranges, calls, groups, devices; and of the file."""
    events = steps(Rank(), bucketed).events
    events += [
        {"ph": "X", "cat": "user_annotation", "name": "mine", "pid": 1, "tid": 100}
        | {"ts": 0, "dur": 3000}
    ]
    trace = {
        "distributedInfo": {"rank": 0, "backend": "nccl"},
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": events,
    }
    pages = []
    for suffix in ("", text):
        path = tmp_path / f"{suffix.replace('/', '-')}a.json"
        path.write_text(json.dumps(everywhere(trace, suffix) if suffix else trace))
        found = ol.diagnose(ol.read_trace(path))
        shown = view.show(found.timeline, title=f"title {suffix}").page()
        pages.append(
            Elements(found.save_html(tmp_path / "a.html").read_text()).found
            + Elements(shown).found
        )
    usual, hostile = pages
    assert set(hostile) <= set(usual)
    assert {key: n for key, n in hostile.items() if key[0] in ("script", "img")} == {
        key: n for key, n in usual.items() if key[0] in ("script", "img")
    }
