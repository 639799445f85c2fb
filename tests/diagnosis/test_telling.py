"""A diagnosis as text, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import overlaplab as ol
from overlaplab.diagnosis import page as page_module
from overlaplab.diagnosis.text import text
from overlaplab.timeline import Source, Timeline
from tests.diagnosis.hand import compute, copy, send, timeline

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m'


def usual() -> Timeline:
    return timeline(
        compute(0, 800),
        send(400, 600),
        send(800, 1000, label="bucket 1"),
        device="NVIDIA H200",
    )


def test_the_text_fits_a_terminal_and_has_no_bare_percentage():
    told = text(ol.diagnose(usual()), details=True)
    assert max(map(len, told.splitlines())) <= 100
    assert "%" not in told
    assert "hidden 200 of 400 us" in told and "Saved 200 of 400 us" in told


def test_no_communication_is_said_and_is_neither_0_nor_100_percent():
    found = ol.diagnose(timeline(compute(0, 100)))
    record = found.to_dict()
    assert not found.has_communication
    assert record["has_communication"] is False
    assert record["remarks"].count("no communication kernels found") == 1
    assert {record["steps"][0][k] for k in ("hidden_ns", "exposed_ns", "saved_ns")} == {
        None
    }
    assert record["whole"][0]["overlap_fraction"] is None
    assert "No communication kernels found" in str(found)


def test_an_empty_timeline_is_told_without_failing(tmp_path: Path):
    found = ol.diagnose(Timeline.of([]))
    assert "No communication kernels found" in str(found)
    assert found.to_dict()["steps"] == []
    assert found.save_html(tmp_path / "a.html").exists()


def test_what_was_dropped_and_by_which_names_is_told():
    source = Source(
        files=("a.json",),
        num_events=10,
        dropped=(("cut off", 3),),
        communication_names=("nccl",),
        remarks=("3 kernels have no launch record",),
    )
    told = text(ol.diagnose(dataclasses.replace(usual(), source=source)), details=True)
    assert "Read 10 events of 1 file; dropped: 3 cut off." in told
    assert "by these names: nccl" in told
    assert "3 kernels have no launch record" in told


def test_the_record_is_json_and_has_the_keys_that_programs_rely_on():
    record = json.loads(json.dumps(ol.diagnose(usual()).to_dict()))
    assert record["format"] == 1
    (step,) = record["steps"]
    assert sum(step["parts"].values()) == step["step_ns"] == 1_000_000
    assert (step["hidden_ns"], step["exposed_ns"]) == (200_000, 200_000)
    (finding,) = record["findings"]
    assert set(finding) == {
        "kind", "rank", "step", "cost_ns", "says", "remedy", "evidence", "spans",
    }  # fmt: skip
    (exposed,) = record["collectives"]
    assert exposed["label"] == "bucket 1" and exposed["exposed_ns"] == 200_000


def test_names_from_a_trace_stay_text_on_the_page_and_harmless_on_a_terminal():
    made = timeline(
        compute(0, 50, name=HOSTILE, label=HOSTILE),
        copy(50, 60, what=HOSTILE),
        send(60, 100, name=HOSTILE, label=HOSTILE),
        device=f"NVIDIA {HOSTILE}",
    )
    found = ol.diagnose(made)
    told = page_module.page(found)
    assert "<script>alert" not in told and "<img src=x" not in told
    assert "\x1b" not in text(found, details=True)


def test_the_page_needs_no_network_and_has_all_of_it(tmp_path: Path):
    found = ol.diagnose(usual())
    told = found.save_html(tmp_path / "report.html").read_text()
    # Names of XML's namespaces are no addresses that anything is loaded from.
    assert not re.search(r'(src|href)\s*=\s*"?(https?:)?//', told)
    assert "@import" not in told and "fetch(" not in told
    for finding in found.findings:
        assert f'data-kind="{finding.kind}"' in told
    assert "ol-timeline-data" in told and "Everything." in told


def test_the_page_replaces_the_old_one_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fails(*_: object, **__: object) -> str:
        raise RuntimeError("stop")

    monkeypatch.setattr(page_module, "page", fails)
    with pytest.raises(RuntimeError, match="stop"):
        ol.diagnose(usual()).save_html(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match="no folder"):
        ol.diagnose(usual()).save_html(tmp_path / "none" / "report.html")


def test_of_many_steps_the_page_draws_the_longest_and_says_so():
    spans = [
        compute(1000 * n, 1000 * n + 500 + 100 * (n == 2), step=n) for n in (1, 2, 3)
    ]
    drawn, told = page_module.shown(ol.diagnose(timeline(*spans)))
    # The window of step 3 begins where step 2 ended: its 900 us are the longest.
    assert [s.attributes["step"] for s in drawn.spans] == [2]
    assert told == "The longest step, 2, of 3 steps."


def test_of_too_many_spans_the_page_draws_the_slowest_ranks_and_longest_spans(
    monkeypatch,
):
    monkeypatch.setattr(page_module, "MOST_SPANS", 10)
    spans = [
        compute(10 * i, 10 * i + 2 + i / 100, rank=rank)
        for rank, number in ((0, 8), (1, 9))
        for i in range(number)
    ]
    drawn, told = page_module.shown(ol.diagnose(timeline(*spans)))
    assert {s.rank for s in drawn.spans} == {1}
    assert "The slowest 1 rank of 2." in told
    monkeypatch.setattr(page_module, "MOST_SPANS", 5)
    drawn, told = page_module.shown(ol.diagnose(timeline(*spans)))
    assert len(drawn.spans) == 4 and "4 of its 9 spans" in told


def test_what_is_no_timeline_is_refused_with_what_gives_one():
    with pytest.raises(TypeError, match=r"timeline is str; .*ol\.read_trace"):
        ol.diagnose("trace.json")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown hardware 'h900'"):
        ol.diagnose(usual(), hardware="h900")
