"""HTA's rules on our timelines, grown traces, and the stored side-by-side results."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import overlaplab as ol
from overlaplab.timeline import Source, Span, Timeline
from tests.trace_peers import growth, hta_rules, measure
from tests.trace_peers.__main__ import without_paths
from tests.trace_peers.tables import tables

US = 1000
TRACES = Path(__file__).parents[1] / "traces" / "hta"
RESULTS = Path(ol.__file__).parent / "bench" / "results"
STORED = sorted(RESULTS.glob("read-traces-*.json"))
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def kernel(
    name: str, start_us: float, end_us: float, launch_us: float | None, step: int = 1
) -> Span:
    sends = "nccl" in name or "all_reduce" in name
    attributes: dict[str, Any] = {"kernel": name}
    if launch_us is not None:
        attributes |= {"launch_ns": round(launch_us * US), "step": step}
    return Span(
        0,
        "comm" if sends else "default",
        "communication" if sends else "compute",
        name,
        round(start_us * US),
        round(end_us * US),
        attributes=attributes,
    )


def timeline(*spans: Span, zero_ns: int = 0) -> Timeline:
    return replace(Timeline.of(spans), source=Source(zero_ns=zero_ns))


def percents(found: list[hta_rules.Step]) -> list[float | None]:
    return [None if s.percent is None else round(s.percent, 2) for s in found]


TWO_STEPS = (
    kernel(NCCL, 0, 10, 0),  # hidden
    kernel("gemm", 0, 10, 0),
    kernel("multimem_all_reduce_kernel", 11, 21, 1),  # HTA does not know it
    kernel(NCCL, 22, 52, 15, step=2),  # exposed
    kernel(NCCL, 60, 70, None),  # leaked from the warm-up, hidden
    kernel("gemm", 60, 70, None),
)


def test_each_rule_of_htas_moves_the_number_by_itself() -> None:
    steps = hta_rules.explain(timeline(*TWO_STEPS), 0)

    assert [(s.rule, p) for s, p in zip(steps, percents(steps), strict=True)] == [
        ("ours", 33.33),  # 20 of 60 us
        ("names of kernels", 40.0),  # 20 of 50
        ("only what has a launch", 25.0),  # 10 of 40
        ("without the last step", 100.0),  # 10 of 10
        ("whole microseconds", 100.0),
    ]


def test_with_all_steps_hta_keeps_the_last_one() -> None:
    steps = hta_rules.explain(timeline(*TWO_STEPS), 0, all_steps=True)
    assert percents(steps) == [33.33, 40.0, 25.0, 25.0, 25.0]


def test_hta_drops_nothing_where_the_trace_has_one_step() -> None:
    one = timeline(*TWO_STEPS[:2], *TWO_STEPS[4:], kernel(NCCL, 80, 90, 20))
    assert percents(hta_rules.explain(one, 0)) == [66.67, 66.67, 66.67]


def test_a_mark_of_the_last_step_on_the_gpu_keeps_what_was_launched_before_it() -> None:
    found = hta_rules.explain(
        timeline(*TWO_STEPS), 0, device_steps=[(16 * US, 17 * US)]
    )
    assert found[-1].percent == 25  # launched at 15: before the mark, though in step 2


def test_short_kernels_vanish_in_whole_microseconds() -> None:
    short = [kernel("gemm", i + 0.3, i + 0.7, 0) for i in range(1000)]
    found = hta_rules.explain(timeline(kernel(NCCL, 0, 1000, 0), *short), 0)
    assert percents(found) == [40.0, 40.0, 0.0]


def test_what_is_rounded_is_the_time_on_the_traces_own_clock() -> None:
    spans = kernel(NCCL, 0, 10, 0), kernel("gemm", 0.3, 1.7, 0)
    assert hta_rules.explain(timeline(*spans), 0)[-1].percent == 0
    moved = hta_rules.explain(timeline(*spans, zero_ns=700), 0)[-1].percent
    assert moved == pytest.approx(100 / 9)  # [1, 2] of [1, 10]


def test_a_collective_that_rounding_turns_over_counts_as_less_than_nothing() -> None:
    spans = (
        kernel(NCCL, 0, 10, 0),
        kernel("gemm", 0, 5, 0),
        kernel(NCCL, 20.2, 20.6, 0),
    )
    assert hta_rules.explain(timeline(*spans), 0)[-1].percent == pytest.approx(500 / 9)


def test_without_communication_both_say_none() -> None:
    found = hta_rules.explain(timeline(kernel("gemm", 0, 5, 0)), 0)
    assert percents(found) == [None, None, None]
    assert hta_rules.agrees(found, None) and not hta_rules.agrees(found, 0.0)


# What HTA 0.5.0 prints, by default and with all steps (tests/traces/hta/README.md).
PRINTED = {
    "hta_sampled_rank0": (11.81, 14.95),
    "hta_nccl_data": (14.31, 15.14),
    "hta_trace_diff_control": (47.03, 46.24),
    "hta_df_index_resolver": (0.0, 0.0),
    "hta_ns_resolution": (None, None),
}


@pytest.mark.parametrize("name", PRINTED)
def test_htas_rules_give_what_hta_prints(name: str) -> None:
    file = TRACES / f"{name}.json.gz"
    read = ol.read_trace(file)
    rank = read.spans[0].rank
    for all_steps, printed in zip((False, True), PRINTED[name], strict=True):
        steps = hta_rules.explain(
            read, rank, all_steps=all_steps, device_steps=measure.device_steps(file)
        )
        assert hta_rules.agrees(steps, printed), steps


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    trace = {"traceEvents": events, "baseTimeNanoseconds": 10**18}
    text = json.dumps(trace, default=float)
    path.write_bytes(
        gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
    )
    return path


def event(category: str, name: str, ts: str, dur: str, **args: Any) -> dict[str, Any]:
    head = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 1}
    return head | {"ts": Decimal(ts), "dur": Decimal(dur), "args": args}


EVENTS = [
    event("user_annotation", "ProfilerStep#7", "900.5", "60.25"),
    event("cuda_runtime", "cudaLaunchKernel", "901.5", "1.125", correlation=5),
    event("kernel", "gemm", "905.001", "7.5", correlation=5, stream=7),
    event("cuda_runtime", "cudaLaunchKernel", "903", "1", correlation=6),
    event("kernel", NCCL, "909.017", "20.002", correlation=6, stream=9),
    {"ph": "s", "id": 6, "pid": 0, "tid": 1, "ts": Decimal("903"), "cat": "ac2g"},
]


def of_copies(number: int) -> list[dict[str, Any]]:
    copies = itertools.islice(growth.repeat(EVENTS), number)
    return list(itertools.chain.from_iterable(copies))


def test_two_copies_hold_twice_the_events_at_the_same_overlap(tmp_path: Path) -> None:
    once = ol.read_trace(write(tmp_path / "once.json", of_copies(1)))
    twice = ol.read_trace(write(tmp_path / "twice.json", of_copies(2)))

    assert len(of_copies(2)) == 2 * len(EVENTS)
    assert once.steps == (7,) and twice.steps == (7, 8)
    assert len(twice.spans) == 2 * len(once.spans)
    (a,), (b,) = once.report().ranks, twice.report().ranks
    assert a.communication_ns == 20_002 and b.communication_ns == 40_004
    assert a.hidden_ns == 3_484 and b.hidden_ns == 6_968
    assert a.overlap_fraction == b.overlap_fraction


def test_no_two_copies_share_an_id() -> None:
    ids = [e["args"]["correlation"] for e in of_copies(3) if e.get("cat") == "kernel"]
    flows = [e["id"] for e in of_copies(3) if e["ph"] == "s"]
    assert ids == [5, 6, 12, 13, 19, 20] and flows == [6, 13, 20]


def test_a_grown_file_is_large_enough_and_the_same_each_time(tmp_path: Path) -> None:
    source = write(tmp_path / "source.json.gz", EVENTS)
    first, second = tmp_path / "a.json", tmp_path / "b.json"

    times = growth.grow(source, first, 5_000)

    assert growth.grow(source, second, 5_000) == times > 1
    assert first.stat().st_size >= 5_000 and first.read_bytes() == second.read_bytes()
    assert len(json.loads(first.read_bytes())["traceEvents"]) == times * len(EVENTS)


SIDE = {
    "overlap_percent": 50.0,
    "read_ns": 4,
    "read_cpu_ns": 4,
    "import_ns": 1,
    "import_cpu_ns": 1,
    "process_cpu_ns": 6,
    "imported_bytes": 10,
    "peak_bytes": 30,
}


def sample(fraction: float | None = 0.5, **other: int) -> dict[str, Any]:
    return {"fractions": [fraction]} | {**SIDE, **other}


def test_medians_and_htas_best_way_count() -> None:
    row = measure.summarise(
        {
            "ours": [sample(), sample(read_cpu_ns=2), sample(read_cpu_ns=900)],
            "json": [sample(0.4, read_cpu_ns=40, peak_bytes=310)],
            "ijson": [sample(0.4, read_cpu_ns=80, peak_bytes=110)],
        }
    )
    assert row["ours"]["read_cpu_ns"] == 4 and row["ours"]["overlap_percent"] == 50
    assert (row["hta"]["fastest"], row["hta"]["leanest"]) == ("json", "ijson")
    assert row["ratios"]["cpu"] == 10
    assert row["ratios"]["peak"] == 3.67 and row["ratios"]["peak_over_imports"] == 5


def test_an_error_of_htas_is_its_result() -> None:
    failed = {"error": "IndexError: list index out of range"}
    row = measure.summarise({"ours": [sample()], "json": [failed]})
    assert row["hta"]["error"] == failed["error"] and "ratios" not in row


def test_ours_alone_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "one.json", of_copies(1))
    said: list[str] = []

    results = measure.measure([file], measure.Plan(rounds=1), said.append)

    (row,) = results["files"]
    assert row["file"] == "one.json" and row["ours"]["overlap_percent"] == 17.4183
    assert 0 < row["ours"]["imported_bytes"] <= row["ours"]["peak_bytes"]
    assert "hta" not in row and results["versions"]["ours"]["overlaplab"]
    assert "17.4183 %" in said[-1]


def test_a_process_that_needs_more_memory_than_the_limit_says_so(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "one.json", of_copies(1))
    plan = measure.Plan(rounds=1, limit_bytes=2**20)
    (row,) = measure.measure([file], plan, lambda said: None)["files"]
    assert row["ours"]["error"].startswith("exit ")


def test_a_python_without_hta_is_refused_with_the_repair() -> None:
    with pytest.raises(ValueError, match=r"no HTA.*pip install HolisticTraceAnalysis"):
        measure.measure([], measure.Plan(sys.executable), print)


def test_marks_of_steps_on_the_gpu_are_found_in_the_text(tmp_path: Path) -> None:
    mark = event("gpu_user_annotation", "ProfilerStep#7", "906.25", "0.5", stream=7)
    other = event("gpu_user_annotation", "forward", "907.0", "1.0")
    file = write(tmp_path / "marks.json.gz", [*EVENTS, mark, other])
    begin = 10**18 + 906_250
    assert measure.device_steps(file) == [(begin, begin + 500)]


def test_a_stored_command_names_files_without_their_folders() -> None:
    said = without_paths("python -m x --hta-python /a/bin/python --out /b/c.json")
    assert said == "python -m x --hta-python python --out c.json"


# --- what is stored ---------------------------------------------------------------


@pytest.fixture(params=STORED, ids=lambda path: path.stem)
def stored(request: pytest.FixtureRequest) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(request.param.read_text())
    return results


def test_there_are_stored_results() -> None:
    assert STORED


def test_stored_results_hold_both_sides_and_explain_every_difference(
    stored: dict[str, Any],
) -> None:
    known = {row["file"]: row for row in stored["files"]}
    assert stored["benchmark"] == "read-traces" and stored["machine"] == "2 CPU cores"
    assert set(measure.known_files()) <= {TRACES / name for name in known}
    for row in known.values():
        assert row["bytes"] > 0 and "error" not in row["ours"]
        for found in row.get("explained", {}).values():
            assert found["equal"], (row["file"], found)
    assert "/" not in stored["command"]


def test_our_stored_numbers_are_the_exact_ones(stored: dict[str, Any]) -> None:
    expected = json.loads((TRACES / "expected.json").read_text())
    for row in stored["files"]:
        # Without a GPU in the trace there is no exact number: ours is gloo's.
        if row["file"] in expected and expected[row["file"]]["devices"]:
            exact = expected[row["file"]]["full_trace"]["overlap_fraction_of_comm"]
            ours = row["ours"]["overlap_percent"]
            assert ours == (
                None if exact is None else pytest.approx(100 * exact, abs=0.01)
            )


def test_the_page_shows_the_newest_results() -> None:
    newest = json.loads(STORED[-1].read_text())
    shown = (RESULTS / "README.md").read_text()
    assert all(table in shown for table in tables(newest))


def test_a_file_that_hta_cannot_read_has_its_error_in_the_table() -> None:
    row = {
        "file": "x.json",
        "bytes": 2**20,
        "ours": SIDE,
        "hta": {"error": "IndexError"},
    }
    costs, _ = tables({"files": [row]})
    assert "| x | 1.0 | 0.000 | IndexError | - | - | 0 | - | - | - |" in costs
