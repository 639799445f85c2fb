"""A diagnosis as text, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import overlaplab as ol
from overlaplab.diagnosis import page as page_module
from overlaplab.diagnosis import tables
from overlaplab.diagnosis.text import finding_title, text
from overlaplab.timeline import Source, Timeline
from tests.diagnosis.hand import MIB, compute, copy, launch, send, timeline, wait

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m'


def usual() -> Timeline:
    return timeline(
        compute(0, 800),
        send(400, 600),
        send(800, 1000, label="bucket 1"),
        device="NVIDIA H200",
    )


def test_the_text_fits_a_terminal_and_has_no_bare_percentage():
    said = text(ol.diagnose(usual()), details=True)
    assert max(map(len, said.splitlines())) <= 100
    assert "%" not in said
    assert said.startswith("Verdict: last-bucket, for 200 us of 1 ms (rank 0).")
    assert "1. last-bucket: 200 us of 1 ms on rank 0" in said
    assert "hidden 200 of 400 us" in said and "Saved" not in said


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


def test_an_empty_timeline_is_reported_without_failing(tmp_path: Path):
    found = ol.diagnose(Timeline.of([]))
    assert "No communication kernels found" in str(found)
    assert found.to_dict()["steps"] == []
    assert found.save_html(tmp_path / "a.html").exists()


def test_what_was_dropped_and_by_which_names_is_reported():
    source = Source(
        files=("a.json",),
        num_events=10,
        dropped=(("cut off", 3),),
        communication_names=("nccl",),
        remarks=("3 kernels have no launch record",),
    )
    said = text(ol.diagnose(dataclasses.replace(usual(), source=source)), details=True)
    assert "Read 10 events of 1 file; dropped: 3 cut off." in said
    short = str(ol.diagnose(dataclasses.replace(usual(), source=source)))
    assert "were dropped, and count nowhere: 3 cut off" in short
    assert "by these names: nccl" in said
    assert "3 kernels have no launch record" in said


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
    page = page_module.page(found)
    assert "<script>alert" not in page and "<img src=x" not in page
    assert "\x1b" not in text(found, details=True)


def test_the_page_needs_no_network_and_has_all_of_it(tmp_path: Path):
    found = ol.diagnose(usual())
    page = found.save_html(tmp_path / "report.html").read_text()
    # Names of XML's namespaces are no addresses that anything is loaded from.
    assert not re.search(r'(src|href)\s*=\s*"?(https?:)?//', page)
    assert "@import" not in page and "fetch(" not in page
    for finding in found.findings:
        assert f'data-kind="{finding.kind}"' in page
    assert "ol-timeline-data" in page and "Everything." in page


def test_the_page_replaces_the_old_one_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fails(*_: object, **__: object) -> str:
        raise RuntimeError("stop")

    monkeypatch.setattr("overlaplab.diagnosis.diagnosis.page", fails)
    with pytest.raises(RuntimeError, match="stop"):
        ol.diagnose(usual()).save_html(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match="no folder"):
        ol.diagnose(usual()).save_html(tmp_path / "none" / "report.html")


def test_of_many_steps_the_page_draws_the_one_that_is_described_and_says_so():
    spans = [
        compute(1000 * n, 1000 * n + 500 + 100 * (n == 2), step=n) for n in (1, 2, 3)
    ]
    found = ol.diagnose(timeline(*spans))
    drawn, said = page_module.shown(found)
    # Windows of 500, 1100 and 900 us: each begins where the step before ended.
    assert [s.attributes["step"] for s in drawn.spans] == [3]
    assert said == "Step 3, of 3 steps."
    assert "step 3" in str(found) and "step 2" not in str(found)


def test_the_drawn_step_is_as_long_as_the_table_says_though_the_cpu_runs_ahead():
    spans = [
        launch(0, 1, step=1, launch=0),
        wait(100, 1990),
        compute(5, 1000, step=1, launch=0),
        compute(1100, 1700, step=2, launch=0),
        send(1500, 2000, step=2, launch=0),
        launch(1600, 1601, step=3),
        compute(2100, 2700, step=3, launch=0),
        send(2500, 3100, step=3, launch=0),
    ]
    found = ol.diagnose(timeline(*spans))
    described = found.case.described
    assert described is not None
    drawn, _ = page_module.shown(found)
    report = drawn.report()
    assert (drawn.start_ns, drawn.end_ns) == (described.start_ns, described.end_ns)
    assert (report.step_ns, report.exposed_ns) == (
        described.step_ns,
        described.exposed_ns,
    )
    assert drawn.steps == (described.step,)


def test_up_to_is_the_most_of_all_steps_and_the_step_described_stands_first():
    spans = []
    for number, sent in ((1, 100), (2, 160), (3, 120)):
        at = 1000 * number
        spans += [
            compute(at, at + 500, step=number),
            send(at + 400, at + 500, step=number),
            send(at + 500, at + 500 + sent, step=number),
        ]
    found = ol.diagnose(timeline(*spans))
    (one,) = found.findings
    assert found.case.described is not None and one.step == found.case.described.step
    costs = {item["step"]: item["ns"] for item in one.evidence["seen"]}
    assert costs == {1: 100_000, 2: 160_000, 3: 120_000}
    title = finding_title(one)
    assert title.endswith("(up to 160 us; seen in 3 steps)")


def test_time_that_no_finding_names_is_said():
    # Idle for 40 us; no launches are known, so no finding can say why.
    made = timeline(compute(0, 100), send(50, 90), compute(140, 200))
    found = ol.diagnose(made)
    assert not found.findings
    assert "Not explained by findings: 40 us idle, 0 ms exposed" in str(found)
    assert found.to_dict()["unexplained"]["idle_ns"] == 40_000
    assert "Not explained" in page_module.page(found)
    assert ol.diagnose(usual()).unexplained is None


def test_messages_are_sorted_by_size_and_the_table_says_that_it_is_cut():
    spans = [compute(0, 10)]
    for index, size in enumerate((25, 1, 100, 4)):
        spans.append(send(10 + index, 11 + index, bytes=size * MIB))
    found = ol.diagnose(timeline(*spans))
    sizes = [row[2] for row in tables.bandwidth(found, 6).rows]
    assert sizes == ["1 MiB", "4 MiB", "25 MiB", "100 MiB"]
    cut = tables.bandwidth(found, 3)
    assert len(cut.rows) == 3 and "1 more sizes" in cut.note
    assert "predicted" in cut.header and "saved" not in tables.numbers(found).header


def test_of_too_many_spans_the_page_draws_the_slowest_ranks_and_longest_spans(
    monkeypatch,
):
    monkeypatch.setattr(page_module, "MOST_SPANS", 10)
    spans = [
        compute(10 * i, 10 * i + 2 + i / 100, rank=rank)
        for rank, number in ((0, 8), (1, 9))
        for i in range(number)
    ]
    drawn, said = page_module.shown(ol.diagnose(timeline(*spans)))
    assert {s.rank for s in drawn.spans} == {1}
    assert "The slowest 1 rank of 2." in said
    monkeypatch.setattr(page_module, "MOST_SPANS", 5)
    drawn, said = page_module.shown(ol.diagnose(timeline(*spans)))
    assert len(drawn.spans) == 4 and "4 of its 9 spans" in said


def test_what_is_no_timeline_is_refused_with_what_gives_one():
    with pytest.raises(TypeError, match=r"timeline is str; .*ol\.read_trace"):
        ol.diagnose("trace.json")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown hardware 'h900'"):
        ol.diagnose(usual(), hardware="h900")
