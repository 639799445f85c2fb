"""Chrome-trace JSON: nothing is lost, nothing is half-written, damage is named."""

import json
import os

import pytest
from hypothesis import given

from overlaplab.errors import TraceError
from overlaplab.timeline import Span, Timeline
from tests.timeline.spans import compute, launch, random_timelines, resolved, send

LINE = resolved(
    (launch(0, 2), None),
    (compute(2, 10_000_000_000_000_001, label="forward"), 0),
    (send(10_000_000_000_000_001, 10_000_000_000_000_030, rank=1), 1),
    num_ranks=2,
)


def events(path, phase):
    trace = json.loads(path.read_text())
    return [e for e in trace["traceEvents"] if e["ph"] == phase]


@given(random_timelines())
def test_a_timeline_comes_back_equal(tmp_path_factory, timeline):
    path = tmp_path_factory.mktemp("trace") / "a.json"
    assert Timeline.from_chrome(timeline.to_chrome(path)) == timeline


def test_nanoseconds_beyond_what_a_float_holds_come_back_exactly(tmp_path):
    back = Timeline.from_chrome(LINE.to_chrome(tmp_path / "a.json"))
    assert back.spans[2].end_ns == 10_000_000_000_000_030


def test_whole_numbers_that_are_floats_come_back_as_what_they_are(tmp_path):
    timeline = Timeline.of([Span(0, "default", "compute", "mm", 0, 2e6, 3.0)])
    path = timeline.to_chrome(tmp_path / "trace.json")
    assert Timeline.from_chrome(path).spans == timeline.spans


def test_ranks_are_processes_and_lanes_are_threads_cpu_first(tmp_path):
    path = LINE.to_chrome(tmp_path / "a.json")
    names = [
        (e["name"], e["pid"], e["tid"], e["args"].get("name"))
        for e in events(path, "M")
        if e["name"].endswith("_name")
    ]
    assert names == [
        ("process_name", 0, 0, "rank 0"),
        ("thread_name", 0, 0, "cpu"),
        ("thread_name", 0, 1, "default"),
        ("process_name", 1, 0, "rank 1"),
        ("thread_name", 1, 0, "comm"),
    ]


def test_times_are_microseconds_with_a_fraction(tmp_path):
    path = Timeline.of([compute(1500, 4001)]).to_chrome(tmp_path / "a.json")
    (event,) = events(path, "X")
    assert (event["ts"], event["dur"]) == (1.5, 2.501)


def test_an_arrow_starts_within_its_cause_and_ends_within_its_effect(tmp_path):
    line = resolved((launch(0, 2000), None), (compute(2000, 9000), 0))
    path = line.to_chrome(tmp_path / "a.json")
    (start,), (finish,) = events(path, "s"), events(path, "f")
    assert (start["tid"], start["ts"]) == (0, 1.999)
    assert (finish["tid"], finish["ts"]) == (1, 2.0)
    assert start["id"] == finish["id"]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = LINE.to_chrome(tmp_path / "a.json")
    before = path.read_bytes()

    def broken(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        Timeline(()).to_chrome(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_attribute_that_is_no_json_value_is_refused(tmp_path):
    line = Timeline.of([compute(0, 1, thing=object())])
    with pytest.raises(TypeError, match="JSON"):
        line.to_chrome(tmp_path / "a.json")
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*gone"):
        LINE.to_chrome(tmp_path / "gone" / "a.json")


def cut(text):
    return text[: len(text) * 7 // 10]


def without_lane(text):
    return text.replace('"lane"', '"lain"', 1)


def negative(text):
    return text.replace('"start_ns":2,', '"start_ns":99999999999999999,', 1)


def cause_out_of_range(text):
    return text.replace('"cause":0', '"cause":7', 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "not JSON, or cut off"),
        (lambda text: "", "not JSON, or cut off"),
        (lambda text: "[]", "without otherData.overlaplab"),
        (lambda text: '{"traceEvents": []}', "overlaplab.profiling"),
        (lambda text: text.replace('"overlaplab":1', '"overlaplab":99'), "format 99"),
        (lambda text: text.replace('"traceEvents":[', '"x":['), "traceEvents"),
        (without_lane, "damaged at span 0"),
        (negative, "damaged at span 1"),
        (cause_out_of_range, "cause 7 of 3 spans"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage, message):
    path = LINE.to_chrome(tmp_path / "a.json")
    path.write_text(damage(path.read_text()))
    with pytest.raises(TraceError, match=message) as caught:
        Timeline.from_chrome(path)
    assert str(path) in str(caught.value)


def test_attributes_that_are_nested_come_back(tmp_path):
    span = Span(0, "default", "compute", "mm", 0, 1, 3, 4, {"parts": [1, {"a": None}]})
    path = Timeline.of([span]).to_chrome(tmp_path / "a.json")
    assert Timeline.from_chrome(path).spans == (span,)
