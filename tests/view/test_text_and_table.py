"""The text twin and the running table."""

import pytest

import overlaplab as ol
from overlaplab.timeline import Span, Timeline
from overlaplab.view import draw, draw_many, table, text
from tests.view.steps import step

MS = 1_000_000


def small():
    """Compute 0-6, messages 4-8 (latency 1) and 8-10, in ms; a wait on the CPU."""
    sent = {"ready_ns": 4 * MS, "latency_ns": MS, "wire_ns": 3 * MS}
    again = {"ready_ns": 8 * MS, "latency_ns": 0, "wire_ns": 2 * MS}
    spans = (
        Span(0, "default", "compute", "mm", 0, 6 * MS),
        Span(0, "cpu", "host", "wait", 1 * MS, 10 * MS),
        Span(0, "comm", "communication", "all_reduce", 4 * MS, 8 * MS, 0, 0, sent),
        Span(0, "comm", "communication", "all_reduce", 8 * MS, 10 * MS, 0, 0, again),
    )
    return Timeline(spans, (None, 3, 0, 2))


def test_text_shows_each_lane_and_the_critical_path():
    assert text(small(), width=47).splitlines() == [
        "step 10 ms     exposed 4 ms     saved 2 ms",
        "                0                        10 ms",
        "rank 0 cpu     |   wwwwwwwwwwwwwwwwwwwwwwwwwww|",
        "rank 0 default |##################            |",
        "rank 0 comm    |            ======!!!!!!!!!!!!|",
        "critical path  |CCCCCCCCCCCCAAAWWWWWWWWWWWWWWW|",
        "! exposed communication   = hidden communication   # compute   w CPU waits",
        "C compute   W wire   A latency   L launch   - idle",
    ]


def test_no_line_of_lanes_is_wider_than_asked():
    lines = text(step(ranks=4), width=72).splitlines()
    assert {len(line) for line in lines if "|" in line} == {72}


def test_too_narrow_a_text_is_refused():
    with pytest.raises(ValueError, match="at least 40"):
        text(small(), width=20)


def test_an_empty_timeline_says_so():
    assert text(Timeline(())) == "an empty timeline"


def test_the_table_has_one_unit_and_shares_that_add_up_to_100():
    made = table({"one": small(), "two": step(plan="serial")})
    header = ("", "step (ms)", "exposed (ms)", "hidden (ms)", "saved (ms)")
    assert made.header[:5] == header
    assert made.rows[0] == (
        *("one", "10.00", "4.00", "2.00", "2.00"),
        *("40", "50", "10", "0", "0"),
    )
    for row in made.rows:
        assert sum(map(int, row[5:])) == 100


def test_the_table_prints_aligned():
    lines = str(table({"one": small(), "a longer name": small()})).splitlines()
    assert lines[1] == (
        "one                   10             4            2           2         40"
        "      50         10         0       0"
    )
    assert lines[1].replace("one          ", "a longer name") == lines[2]


def test_a_name_with_markup_stays_text_in_html():
    page = table({"<b>bold</b>": small()})._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page


def test_markdown_has_a_rule_of_as_many_cells_as_the_header():
    head, rule, row, _, note = table({"one": small()})._repr_markdown_().splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert note.startswith("%: shares of the critical path")


def test_a_run_in_the_place_of_its_timeline_is_refused_with_the_repair():
    run = ol.Run((), small())
    for show in (text, draw, lambda r: table({"a": r}), lambda r: draw_many({"a": r})):
        with pytest.raises(TypeError, match=r"got a Run; pass its \.timeline"):
            show(run)
    for show in (table, draw_many):
        with pytest.raises(TypeError, match=r"timeline, .*got a list"):
            show([small()])
