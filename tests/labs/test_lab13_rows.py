"""An embedding's gradient as rows: what the lesson says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlaplab_course import lab13 as lab
from overlaplab_course.lab13 import measured, rows, thesis

RESULTS = Path(__file__).parents[2] / "overlaplab/bench/results"


def test_rows_are_sent_where_they_are_less_and_shorten_the_step():
    for link in thesis.LINKS:
        table_ms, none = rows.step_ms(link, 2, False)
        rows_ms, one = rows.step_ms(link, 2, True)
        assert (none, one) == (0, 1)
        assert rows_ms < table_ms
        assert rows.step_ms(link, 16, True) == rows.step_ms(link, 16, False)


def test_the_table_says_what_the_plan_did():
    lines = lab.rows_table().splitlines()[1:]
    assert ["stays a table" in line for line in lines] == [False, False, True, True]
    for line in lines:  # no plan without a reason in bytes
        table, by_rows = map(float, line.split(",")[1].split()[2:4])
        assert ("stays a table" in line) == (by_rows > table)


def test_what_is_stored_is_what_the_benchmark_stored():
    for case in measured._stored()["rows"]:
        stored = json.loads((RESULTS / case["file"]).read_text("utf-8"))
        (found,) = (c for c in stored["cases"] if c["batch"] == case["batch"])
        for way, ms in case["ms"].items():
            assert ms == pytest.approx(found["variants"][way]["median_ms"], abs=1e-3)
    assert list(measured.ms_of_rows()) == [
        *("P2P off, batch 2", "P2P off, batch 8", "NVLink, batch 2", "NVLink, batch 8"),
    ]


def test_the_gradient_of_the_table_is_one_of_the_last_operators():
    assert "embedding_dense_backward(" in lab.last_operators()
