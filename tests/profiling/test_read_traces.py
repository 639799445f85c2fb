"""Six public traces give the numbers that were worked out for them by other means."""

import functools
import json
import tracemalloc
from pathlib import Path

import pytest

import overlaplab as ol
from overlaplab.timeline.intervals import merge, total
from tests.profiling.traces_by_hand import annotation, kernel, write

FOLDER = Path(__file__).parents[1] / "traces" / "hta"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
TRACES = sorted(name for name in EXPECTED if name.endswith(".gz"))
# expected.json was computed in floats of microseconds: of 1.7e15, a quarter is lost.
TOLERANCE = 1e-4


@functools.cache
def timeline(name):
    return ol.read_trace(FOLDER / name)


ON_DEVICE = ("compute", "communication", "memcpy", "memset")


def on_gpu(timeline):
    return timeline.where(lambda span: span.kind in ON_DEVICE)


def assert_close(measured, expected):
    unknown = [name for name, value in expected.items() if value is None]
    assert [name for name, value in measured.items() if value is None] == unknown
    known = {name: value for name, value in measured.items() if value is not None}
    assert known == pytest.approx(
        {name: expected[name] for name in known}, rel=TOLERANCE
    )


@pytest.mark.parametrize("name", TRACES)
def test_a_real_trace_has_the_known_numbers_of_events(name):
    spans, expected = on_gpu(timeline(name)).spans, EXPECTED[name]
    kinds = [span.kind for span in spans]

    assert len(kinds) == expected["n_gpu_events"]
    assert kinds.count("communication") == expected["n_comm"]
    assert kinds.count("compute") == expected["n_comp"]


@pytest.mark.parametrize("name", TRACES)
def test_a_real_trace_has_the_known_overlap(name):
    read, expected = timeline(name), EXPECTED[name]["full_trace"]
    report, gpu = read.report(), on_gpu(read)
    busy_ns = total(merge((s.start_ns, s.end_ns) for s in gpu.spans))

    measured = {
        "comm_union_us": report.communication_ns / 1000,
        "comp_union_us": report.compute_ns / 1000,
        "overlap_us": report.hidden_ns / 1000,
        "exposed_comm_us": report.exposed_ns / 1000,
        "overlap_fraction_of_comm": report.overlap_fraction,
        "span_us": gpu.report().step_ns / 1000 if gpu.spans else None,
        "busy_union_us": busy_ns / 1000,
    }
    assert_close(measured, expected)


@pytest.mark.parametrize("name", TRACES)
def test_a_real_trace_has_the_known_overlap_in_each_step(name):
    expected = EXPECTED[name]["per_step_by_launch"]
    measured = {}
    for step in timeline(name).steps:
        report = timeline(name).of_step(step).report()
        measured[f"ProfilerStep#{step}"] = {
            "comm_us": report.communication_ns / 1000,
            "comp_us": report.compute_ns / 1000,
            "overlap_us": report.hidden_ns / 1000,
            "fraction": report.overlap_fraction,
        }

    assert list(measured) == EXPECTED[name]["profiler_steps"]
    for step, numbers in measured.items():
        assert_close(numbers, expected[step])


@pytest.mark.parametrize("name", TRACES)
def test_a_real_trace_loses_nothing_and_has_the_rank_that_it_names(name):
    read = timeline(name)

    assert read.source.dropped == ()
    assert {s.rank for s in read.spans} == {EXPECTED[name]["distributed_rank"]}


def test_a_foreign_trace_without_gpus_computes_and_sends_nothing():
    read = timeline("hta_cpu_only.json.gz")

    assert {span.kind for span in read.spans} == {"host"}
    assert [s.name for s in read.spans if s.lane == "gloo"] == ["all_reduce"] * 10
    assert read.report().overlap_fraction is None
    assert "no communication kernels found" in read.source.remarks
    assert "no number here is about a GPU" in " ".join(read.source.remarks)


def cpu_trace(*marks):
    operator = {**annotation("aten::mm", 1, 5), "cat": "cpu_op"}
    transfer = annotation("gloo:all_reduce", 2, 9, thread=7)
    return [*marks, operator, {**operator, "tid": 8, "ts": 6, "dur": 1}, transfer]


def test_operators_and_gloo_are_the_host_s_where_no_run_of_ours_was_recorded(tmp_path):
    read = ol.read_trace(write(tmp_path / "trace.json", cpu_trace()))

    assert {span.kind for span in read.spans} == {"host"}
    assert read.order() == (
        "0 cpu mm 0-4000\n0 gloo all_reduce 1000-8000\n0 thread 8 mm 5000-6000"
    )


@pytest.mark.parametrize(
    "mark",
    [
        annotation("overlaplab::run", 0, 10),
        annotation("overlaplab::launch all_reduce|default|0|64|", 1, 2),
        annotation("overlaplab::wait all_reduce", 6, 9),
    ],
)
def test_a_run_of_ours_on_cpus_computes_and_sends(tmp_path, mark):
    read = ol.read_trace(write(tmp_path / "trace.json", cpu_trace(mark)))

    report = read.report()
    assert (report.compute_ns, report.communication_ns) == (5_000, 7_000)
    assert report.hidden_ns == 4_000
    assert "no communication kernels found" not in read.source.remarks


def test_a_trace_without_collectives_says_so_and_has_no_overlap():
    read = timeline("hta_ns_resolution.json.gz")

    assert read.report().overlap_fraction is None
    assert "no communication kernels found" in read.source.remarks


def test_old_traces_name_their_kernels_by_the_operator_that_launched_them():
    names = {s.name for s in timeline("hta_df_index_resolver.json.gz").spans}

    assert {"fill_", "add", "mul", "all_reduce"} <= names


def test_memory_is_that_of_what_is_kept_and_not_of_the_file(tmp_path):
    arrow = json.dumps({"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 1, "ts": 1.5})
    path = tmp_path / "trace.json"
    with open(path, "w") as file:
        file.write('{"traceEvents": [' + json.dumps(kernel("gemm", 7, 0, 1)))
        for _ in range(100):
            file.write((", " + arrow) * 2000)
        file.write("]}")
    assert path.stat().st_size > 12 << 20
    ol.read_trace(path)  # what the first call keeps for good

    tracemalloc.start()
    timeline = ol.read_trace(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert timeline.source.num_events == 200_001
    # A block, its text closed by a bracket, its events: about 3,700 of them.
    assert peak_bytes < 4 << 20
