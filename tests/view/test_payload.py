"""The columns that the script draws from say exactly what the timeline says."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.timeline import KINDS, Memory, Span, Timeline
from overlaplab.view.colors import COLORS
from overlaplab.view.payload import column, payload, to_json
from tests.view.steps import step

spans = st.builds(
    lambda rank, lane, kind, name, start, length, size, label: Span(
        rank,
        lane,
        kind,
        name,
        start,
        start + length,
        bytes=size,
        attributes={"label": label} if label else {},
    ),
    st.integers(0, 2),
    st.sampled_from(["cpu", "default", "comm"]),
    st.sampled_from(KINDS),
    st.text(max_size=6),
    st.integers(0, 2**52),
    st.integers(0, 2**51),
    st.integers(0, 2**52),
    st.sampled_from(["", "bucket 1", "</script>"]),
)
timelines = st.lists(spans, min_size=1, max_size=12).map(Timeline.of)


def values(column: dict[str, Any], count: int) -> list[int]:
    if column["type"] == "zero":
        return [0] * count
    found = np.frombuffer(column["data"], dtype=f"<{column['type']}")
    return [int(value) for value in found]


def rows(table: dict[str, Any]) -> list[dict[str, int]]:
    count = table["count"]
    read = {name: values(c, count) for name, c in table.items() if name != "count"}
    assert all(len(column) == count for column in read.values())
    return [{name: column[i] for name, column in read.items()} for i in range(count)]


@given(timelines)
def test_a_payload_decodes_to_the_spans(timeline):
    sent = payload(timeline)
    decoded = [
        Span(
            *sent["lanes"][row["lane"]],
            sent["kinds"][row["kind"]],
            sent["strings"][row["name"]],
            timeline.start_ns + row["start"],
            timeline.start_ns + row["start"] + row["length"],
            bytes=row["bytes"],
            attributes=(
                {"label": sent["strings"][row["label"]]} if row["label"] else {}
            ),
        )
        for row in rows(sent["spans"])
    ]
    assert decoded == list(timeline.spans)


@given(timelines)
def test_what_is_exposed_on_lanes_that_do_not_overlap_adds_up_to_the_report(timeline):
    one_lane = timeline.where(lambda s: s.kind != "communication" or s.lane == "comm")
    if not one_lane.spans:
        return
    sent = payload(one_lane)
    for rank in one_lane.report().ranks:
        lanes = {i for i, lane in enumerate(sent["lanes"]) if lane[0] == rank.rank}
        exposed = sum(r["length"] for r in rows(sent["exposed"]) if r["lane"] in lanes)
        assert exposed == rank.exposed_ns


def test_of_a_message_half_beside_a_product_the_other_half_is_exposed():
    timeline = Timeline.of(
        [
            Span(0, "default", "compute", "mm", 100, 160),
            Span(0, "comm", "communication", "all_reduce", 140, 200),
        ]
    )

    sent = payload(timeline)

    (exposed,) = rows(sent["exposed"])
    assert (exposed["start"], exposed["length"]) == (60, 40)
    assert [row["hidden"] for row in rows(sent["spans"])] == [0, 20]


@given(timelines)
def test_a_span_is_hidden_for_at_most_as_long_as_it_takes(timeline):
    for row, span in zip(rows(payload(timeline)["spans"]), timeline.spans, strict=True):
        assert 0 <= row["hidden"] <= span.duration_ns
        assert span.kind == "communication" or row["hidden"] == 0


def test_hidden_is_what_the_report_calls_so_where_messages_do_not_overlap():
    timeline = step(ranks=2)
    sent = payload(timeline)
    for rank in timeline.report().ranks:
        hidden = sum(
            row["hidden"]
            for row in rows(sent["spans"])
            if sent["lanes"][row["lane"]][0] == rank.rank
        )
        assert hidden == rank.hidden_ns > 0


def test_the_path_and_the_causes_are_the_timelines():
    timeline = step(ranks=2)
    sent = payload(timeline)
    path = [
        (row["start"] + timeline.start_ns, row["length"], row["span"] - 1)
        for row in rows(sent["path"])
    ]
    assert path == [
        (s.start_ns, s.end_ns - s.start_ns, -1 if s.span is None else s.span)
        for s in timeline.critical_path().segments
    ]
    causes = [row["cause"] - 1 for row in rows(sent["spans"])]
    assert causes == [-1 if c is None else c for c in timeline.causes]


def test_a_measured_span_is_caused_by_what_ended_before_it():
    timeline = Timeline.of(
        [
            Span(0, "default", "compute", "a", 0, 10),
            Span(0, "default", "compute", "b", 10, 30),
            Span(0, "comm", "communication", "c", 31, 40),
        ]
    )
    causes = [row["cause"] - 1 for row in rows(payload(timeline)["spans"])]
    assert causes == [-1, 0, 1]


def test_the_parts_of_a_message_are_those_of_the_static_figure():
    waits = Span(
        0, "comm", "communication", "all_reduce", 5, 105,
        attributes={"ready_ns": 25, "latency_ns": 30},
    )  # fmt: skip
    sent = payload(Timeline.of([waits]))
    (row,) = rows(sent["spans"])
    assert (row["waiting"], row["latency"]) == (20, 30)
    assert list(COLORS)[row["color"]] == "wire"


def test_of_too_many_spans_the_longest_are_sent_and_a_remark_says_so():
    timeline = step(ranks=2)
    sent = payload(timeline, max_spans=10)
    lengths = sorted((s.duration_ns for s in timeline.spans), reverse=True)
    got = rows(sent["spans"])
    assert sorted((r["length"] for r in got), reverse=True) == lengths[:10]
    assert [timeline.spans[r["index"]].duration_ns for r in got] == [
        r["length"] for r in got
    ]
    assert sent["num_spans"] == len(timeline.spans)
    assert sent["step_ns"] == timeline.step_ns
    (remark,) = sent["remarks"]
    assert f"10 longest of {len(timeline.spans)} spans" in remark


def test_memory_is_sent_from_the_timelines_start_on():
    timeline = Timeline(
        (Span(0, "default", "compute", "mm", 100, 200),),
        memory=(
            Memory(
                0,
                ((100, 2**21), (150, 2**20)),
                (("w", 2**20),),
                (("inputs", (2**21, 2**20)),),
            ),
        ),
    )
    (memory,) = payload(timeline)["memory"]
    assert values(memory["time"], 2) == [0, 50]
    assert values(memory["size"], 2) == [2**21, 2**20]
    ((kind, sizes),) = memory["kinds"]
    assert (kind, values(sizes, 2)) == ("inputs", [2**21, 2**20])
    assert memory["summary"] == "peak 2 MiB: inputs 2 MiB; largest: w 1 MiB"


def test_nothing_happened_is_a_payload_too():
    sent = payload(Timeline(()))
    assert sent["spans"]["count"] == 0
    assert sent["lanes"] == []


@pytest.mark.parametrize(
    ("most", "width"),
    [(255, "u1"), (256, "u2"), (2**16, "u4"), (2**32, "f8"), (2**53 - 1, "f8")],
)
def test_a_column_is_as_narrow_as_its_values_allow_and_exact(most, width):
    made = column([1, most])
    assert made["type"] == width
    assert values(made, 2) == [1, most]


def test_for_a_file_bytes_are_base64():
    made = to_json(payload(step()))
    start = made["spans"]["start"]["data"]
    assert base64.b64decode(start) == payload(step())["spans"]["start"]["data"]
