"""Files that mean harm, or only look as if: a remark or one clear error, no traceback.

Each was found by trying; times are microseconds.
"""

import contextlib
import gc
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import overlaplab as ol
from overlaplab.errors import TraceError
from overlaplab.profiling.trace import searching
from overlaplab.timeline import Span, chrome
from tests.profiling.traces_by_hand import COMM, annotation, kernel, launch, write


@pytest.fixture
def read(tmp_path):
    def read(events, *, communication=(), **fields):
        path = write(tmp_path / "trace.json", events, **fields)
        return ol.read_trace(path, communication=communication)

    return read


def remarks(timeline):
    return "; ".join(timeline.source.remarks)


def fraction(timeline):
    return timeline.report().overlap_fraction


EVENTS = [kernel(COMM, 20, 0, 10), kernel("gemm", 7, 0, 5)]


# --- patterns ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "patterns", [[r"^(g)emm\1?$"], ["(?i)GEMM"], ["(?P<a>ge)", "(?P<a>mm)"], "gemm"]
)
def test_a_pattern_means_what_it_means_alone(read, patterns):
    timeline = read(EVENTS, communication=patterns)

    assert {span.kind for span in timeline.spans} == {"communication"}


@pytest.mark.parametrize("pattern", ["", "gemm|", "a{99999999999}", "("])
def test_a_pattern_that_says_nothing_is_refused_by_name(read, pattern):
    with pytest.raises(ValueError, match="communication=") as caught:
        read(EVENTS, communication=[pattern])

    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize("pattern", [b"gemm", 5, None])
def test_a_pattern_that_is_no_text_is_a_type_error(read, pattern):
    with pytest.raises(TypeError, match=r"communication=.*regular expression"):
        read(EVENTS, communication=[pattern])
    with pytest.raises(TypeError, match=r"communication=.*regular expression"):
        read(EVENTS, communication=5)


# --- numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e999999", '"1e999999"', '"1' + "0" * 5000 + '"'])
def test_numbers_beyond_all_clocks_are_no_times(read, number):
    text = json.dumps({"traceEvents": [*EVENTS, kernel("odd", 7, 7, 12345)]})

    timeline = read(text.replace("12338", number))

    assert len(timeline.spans) == 2
    assert timeline.source.num_dropped == 1
    assert "1 events dropped" in remarks(timeline)


def test_sizes_that_no_memory_has_are_unknown(read):
    long = "[" * 100_000
    timeline = read(
        [
            kernel(COMM, 20, 0, 1, **{"Process Group Ranks": long}),
            kernel(COMM, 20, 2, 3, **{"Input Dims": [[-5, 10]]}),
            kernel(COMM, 20, 4, 5, **{"In msg nelems": 2**62, "dtype": "Double"}),
            kernel(COMM, 20, 6, 7, **{"Input Dims": [[-5, 10]], "Input type": ["int"]}),
            kernel("copy", 7, 8, 9, cat="gpu_memcpy", bytes=2**63),
        ]
    )

    assert [span.bytes for span in timeline.spans] == [0] * 5


def test_what_is_read_can_be_written_and_read_again(read, tmp_path):
    timeline = read(
        [
            annotation("ProfilerStep#" + "9" * 5000, 0, 9),
            launch(1, 0, 1, thread=2**70),
            kernel("gemm", 2**70, 100, 105, correlation=1, grid=[2**70, 1, 1]),
            kernel(COMM, 20, 200, 210, Seq=2**70),
        ],
        baseTimeNanoseconds=1_719_853_884_000_000_000,
    )

    again = ol.Timeline.from_chrome(timeline.to_chrome(tmp_path / "own.json"))

    assert again == timeline
    assert again.source.zero_ns == 1_719_853_884_000_000_000


@pytest.mark.parametrize("end", [600, 3000])
def test_a_kernel_ends_where_the_next_of_its_stream_starts_and_is_named(read, end):
    timeline = read(
        [
            kernel("A", 7, 0, 1000),
            kernel("B", 7, 10, 20),
            kernel(COMM, 20, 500, end),
        ]
    )

    assert timeline.report().overlap_fraction == 0.0
    assert "'A' lasts 1000 us, beyond the start of the one behind it" in remarks(
        timeline
    )


@pytest.mark.parametrize(
    "kernels",
    [
        [kernel("A", 7, 0, 10), kernel("B", 7, 0, 1000)],
        [kernel("A", 7, 0, 10.9), kernel("B", 7, 10, 1000)],
        [
            launch(5, -9, -8, name="cudaGraphLaunch"),
            kernel("A", 7, 0, 1000, correlation=5),
            kernel("B", 7, 10, 20, correlation=5),
        ],
    ],
    ids=["equal starts", "under a microsecond", "one graph"],
)
def test_what_a_stream_can_do_is_no_alarm(read, kernels):
    timeline = read([*kernels, kernel(COMM, 20, 500, 600)])

    assert timeline.report().overlap_fraction == 1.0
    assert "works in order" not in remarks(timeline)


def test_a_kernel_after_a_graph_ends_those_of_the_graph(read):
    graph = [kernel("A", 7, 0, 1000, correlation=5)]
    graph += [kernel("B", 7, 10, 20, correlation=5)]
    timeline = read([*graph, kernel("C", 7, 400, 410), kernel(COMM, 20, 500, 600)])

    assert timeline.report().overlap_fraction == 0.0


def test_kernels_of_expert_parallel_libraries_communicate(read):
    timeline = read(
        [
            kernel("void lib::ep::internode::dispatch<false>(int4*)", 23, 0, 10),
            kernel("gemm", 7, 5, 15),
        ]
    )

    assert timeline.report().overlap_fraction == 0.5


def test_a_job_of_many_ranks_that_sends_nothing_names_its_kernels_by_stream(read):
    kernels = [kernel("mine::exchange(int4*)", 23, 0, 10), kernel("gemm", 7, 5, 15)]
    said = remarks(read(kernels, distributedInfo={"rank": 0, "world_size": 64}))

    assert "a job of 64 ranks" in said and "--communication" in said
    assert "'mine::exchange(int4*)' (1x)" in said
    assert "--communication" not in remarks(read(kernels))


def test_a_row_at_time_zero_in_a_trace_of_today_is_dropped(read):
    now = 1_712_195_495_000_000
    late = [kernel("gemm", 7, now, now + 5), kernel("gemm", 7, now + 6, now + 9)]

    timeline = read([kernel("odd", 7, 0, 5), *late])

    assert timeline.report().step_ns == 9_000
    assert timeline.source.dropped == (("time 0, long before all else", 1),)


# --- steps and processes -----------------------------------------------------------


def test_a_step_that_stands_twice_is_reported(read):
    twice = [annotation("ProfilerStep#1", 0, 9), annotation("ProfilerStep#1", 50, 60)]
    merged = [twice[0], {**twice[0], "pid": 200}]

    assert "ProfilerStep#1 stands 2 times" in remarks(read([*twice, *EVENTS]))
    assert "ProfilerStep#1" not in remarks(read([*merged, *EVENTS]))


def test_a_process_is_one_however_its_number_is_spelled(read):
    timeline = read([EVENTS[0], {**EVENTS[1], "pid": "0"}])

    assert fraction(timeline) == 0.5


# --- files --------------------------------------------------------------------------


def test_a_second_list_of_events_is_reported(read):
    first, second = json.dumps([EVENTS[1]]), json.dumps([EVENTS[0]])
    one = f'{{"traceEvents": {first}, "traceEvents": {second}}}'
    two = f'{{"traceEvents": {first}}}\n{{"traceEvents": {second}}}'

    for text in (one, two):
        timeline = read(text)
        assert len(timeline.spans) == 1
        assert "more events follow, in a second 'traceEvents': not read" in remarks(
            timeline
        )


def test_a_file_without_events_says_so(read):
    for text in ("[]", '{"traceEvents": []}'):
        timeline = read(text)
        assert timeline.spans == ()
        assert "has no events" in remarks(timeline)


@pytest.mark.parametrize("before", ["", '{"note": "', '{"traceEvents": [], "note": "'])
def test_blanks_without_end_take_time_in_proportion(tmp_path, before):
    def cpu_s(num_mib):
        path = tmp_path / f"{num_mib}.json.gz"
        path.write_bytes(gzip.compress(before.encode() + b" " * (num_mib << 20)))
        start = time.process_time()
        with contextlib.suppress(TraceError):
            ol.read_trace(path)
        return time.process_time() - start

    cpu_s(1)
    # 16 times as much; 256 times would be the square of it.
    assert cpu_s(32) < 80 * max(cpu_s(2), 0.005)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("compress", [False, True])
def test_a_pipe_is_read_as_a_file_is(tmp_path, compress):
    data = write(tmp_path / "trace.json", EVENTS, compress=compress).read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()

    timeline = ol.read_trace(pipe)

    writer.join()
    assert fraction(timeline) == 0.5


def test_arguments_of_another_type_are_refused_in_words(tmp_path):
    path = write(tmp_path / "trace.json", EVENTS)

    for paths in (None, 5, [None]):
        with pytest.raises(TypeError, match="path"):
            ol.read_trace(paths)
    for block_bytes in (0, -5):
        with pytest.raises(ValueError, match=f"block_bytes={block_bytes}"):
            ol.read_trace(path, block_bytes=block_bytes)
    with pytest.raises(TypeError, match="block_bytes='64k'; expected a whole number"):
        ol.read_trace(path, block_bytes="64k")


# --- our own files in a folder ------------------------------------------------------


def test_a_folder_of_one_timeline_of_ours_is_that_timeline(read, tmp_path):
    timeline = read(EVENTS)
    folder = tmp_path / "own"
    folder.mkdir()
    timeline.to_chrome(folder / "a.json")
    (folder / "notes.txt").write_text("slow today")

    assert ol.read_trace(folder) == timeline
    assert ol.read_trace([folder]) == timeline


def test_a_folder_of_several_timelines_of_ours_asks_for_one(read, tmp_path):
    timeline, folder = read(EVENTS), tmp_path / "own"
    folder.mkdir()
    for name in ("a.json", "b.json"):
        timeline.to_chrome(folder / name)

    with pytest.raises(TraceError, match=r"own: 2 timelines .*a\.json, b\.json"):
        ol.read_trace(folder)
    with pytest.raises(TraceError, match=r"a\.json: a timeline .* read it alone"):
        ol.read_trace([folder / "a.json", tmp_path / "trace.json"])


# --- bombs ------------------------------------------------------------------------


def test_a_string_without_end_takes_time_in_proportion_and_little_memory(tmp_path):
    """50 MB in 50 KB; it took seconds, and 500 MB 40 times as long."""
    path = tmp_path / "a.json.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "')
        for _ in range(50):
            file.write(b"a" * 1_000_000)
        file.write(b'", "ts": 1, "dur": 2}]}')
    with pytest.raises(TraceError, match="no whole event"), limited_cpu(1):
        ol.read_trace(path)


@contextlib.contextmanager
def limited_cpu(seconds):
    before = time.process_time()
    yield
    assert time.process_time() - before < seconds


def test_a_timeline_of_ours_that_is_too_long_for_memory_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(chrome, "MOST_BYTES", 1 << 20)
    text = b'{"otherData": {"overlaplab": 1}, "traceEvents": [' + b" " * (2 << 20)
    for name, data in (("a.json", text), ("b.json.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TraceError, match=rf"{name}.*more than 1 MiB.*of_step"):
            ol.Timeline.from_chrome(tmp_path / name)


@pytest.mark.parametrize("where", ["in the main thread", "in another thread"])
def test_a_pattern_that_searches_without_end_is_refused_by_name(
    read, monkeypatch, where
):
    monkeypatch.setattr(searching, "SEARCH_S", 0.05)
    before = signal.getsignal(signal.SIGVTALRM)
    endless = [kernel("a" * 60 + "!", 7, 0, 1)]
    reads = partial(read, endless, communication=["(a+)+$"])
    if where == "in another thread":
        with ThreadPoolExecutor(1) as other:
            reads = other.submit(reads).result
    with pytest.raises(ValueError, match=r"communication='\(a\+\)\+\$' takes more"):
        reads()
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_pattern_means_the_same_in_another_thread_and_leaves_no_child(
    read, monkeypatch
):
    children, start = [], subprocess.Popen

    def popen(*args, **kwargs):
        children.append(start(*args, **kwargs))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with ThreadPoolExecutor(1) as other:
        timeline = other.submit(read, EVENTS, communication=["^GEM"]).result()
    assert {span.kind for span in timeline.spans} == {"communication"}
    gc.collect()
    assert [child.returncode for child in children] == [-signal.SIGKILL]


INTERRUPTED = """
import os, signal, threading
from overlaplab.profiling.trace.searching import LimitedSearch
search = LimitedSearch("(a+)+$")
search("")
threading.Timer(0.1, os.killpg, (0, signal.SIGINT)).start()
try:
    search("a" * 60 + "!")
except KeyboardInterrupt:
    print(search("b"), search("a"))
"""


def test_an_interrupted_search_says_nothing_and_the_next_one_has_its_own_answer():
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        start_new_session=True,  # as a terminal interrupts: all of the group
        capture_output=True,
        text=True,
    )
    assert (ended.stdout, ended.stderr) == ("False True\n", "")


def test_an_empty_and_a_hidden_file_among_traces_are_skipped_and_named(tmp_path):
    write(tmp_path / "rank_0.json", [kernel("gemm", 7, 0, 1)])
    (tmp_path / "empty.json").write_bytes(b"")
    (tmp_path / ".rank_0.json").write_bytes((tmp_path / "rank_0.json").read_bytes())
    said = remarks(ol.read_trace(tmp_path))
    assert "no traces, ignored: .rank_0.json, empty.json" in said


def test_an_integer_of_30_digits_names_its_file(tmp_path):
    path = tmp_path / "own.json"
    ol.Timeline.of([Span(0, "default", "compute", "mm", 0, 123_456)]).to_chrome(path)
    path.write_text(path.read_text().replace("123456", "9" * 30))
    with pytest.raises(TraceError, match=r"own\.json: damaged at span 0.*end_ns"):
        ol.read_trace(path)
