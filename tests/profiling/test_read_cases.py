"""Public reports of profilers that said something else than what had happened.

Times are microseconds; each test has the smallest trace that shows the fault.
"""

import json

import pytest

import overlaplab as ol
from overlaplab.errors import TraceError
from tests.profiling.traces_by_hand import COMM, annotation, kernel, launch, write


@pytest.fixture
def read(tmp_path):
    def read(events, **fields):
        return ol.read_trace(write(tmp_path / "trace.json", events, **fields))

    return read


def fraction(timeline):
    return timeline.report().overlap_fraction


# --- what is communication ------------------------------------------------------


def test_kernels_of_every_nccl_and_rccl_are_communication(read):
    timeline = read(
        [
            kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 20, 0, 10),
            kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 20, 20, 30),
            kernel("ncclSymkDevKernel_AllGather_LL(ncclSymkArgs)", 20, 40, 50),
            kernel("void rcclGenericKernel<1>(ncclDevComm*)", 20, 60, 70),
            kernel("gemm", 7, 5, 65),
        ]
    )

    assert fraction(timeline) == 0.75


def test_the_operation_is_the_one_in_the_arguments_not_the_one_in_the_name(read):
    said = {"Collective name": "reduce_scatter", "dtype": "Float", "In msg nelems": 8}
    timeline = read([kernel(COMM, 20, 0, 1, **said), kernel(COMM, 20, 2, 3)])

    first, second = timeline.spans
    assert (first.name, first.bytes) == ("reduce_scatter", 32)
    assert "operation_from" not in first.attributes
    assert (second.name, second.attributes["operation_from"]) == (
        "all_reduce",
        "kernel name",
    )


def test_a_row_of_the_gpu_that_repeats_an_annotation_is_no_kernel(read):
    row = annotation("nccl:all_reduce", 0, 100, cat="gpu_user_annotation")

    timeline = read([kernel(COMM, 20, 10, 20), kernel("gemm", 7, 15, 40), row])

    assert fraction(timeline) == 0.5
    assert len(timeline.spans) == 2


def test_annotations_without_kernels_are_no_communication_and_no_percentage(read):
    row = annotation("nccl:all_reduce", 0, 100, cat="gpu_user_annotation")

    timeline = read([kernel("gemm", 7, 15, 40), row])

    assert fraction(timeline) is None
    assert "no communication kernels found" in timeline.source.remarks


def test_synchronisation_is_no_kernel(read):
    timeline = read(
        [
            kernel(COMM, 20, 0, 10),
            kernel("Stream Wait Event", 7, 0, 10, cat="cuda_sync"),
            kernel("Context Sync", 7, 0, 10),
        ]
    )

    assert fraction(timeline) == 0.0


def test_communication_on_the_stream_that_computes_is_communication(read):
    names = [
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(x)",
        "one_shot_all_reduce_kernel",
        "two_shot_all_reduce_kernel_inplace",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)",
    ]
    events = [kernel(n, 7, 10 * i, 10 * i + 5) for i, n in enumerate(names)]

    report = read([*events, kernel("gemm", 7, 50, 60)]).report()

    assert (report.communication_ns, report.hidden_ns) == (20_000, 0)


def test_the_list_of_names_can_be_extended_and_is_reported(tmp_path):
    events = [kernel("my_ring_exchange", 9, 0, 10), kernel("gemm", 7, 0, 5)]
    path = write(tmp_path / "trace.json", events)

    without = ol.read_trace(path)
    extended = ol.read_trace(path, communication=["my_ring_.*"])

    assert (fraction(without), fraction(extended)) == (None, 0.5)
    assert extended.source.communication_names[-1] == "my_ring_.*"
    assert (
        without.source.communication_names == extended.source.communication_names[:-1]
    )


def test_a_pattern_that_is_no_regular_expression_is_named(tmp_path):
    path = write(tmp_path / "trace.json", [kernel("gemm", 7, 0, 1)])

    with pytest.raises(ValueError, match=r"communication='ring\(' is no regular"):
        ol.read_trace(path, communication=["ring("])


def test_kernels_that_nobody_knows_compute_and_copies_do_not(read):
    timeline = read(
        [
            kernel(COMM, 20, 0, 10),
            kernel("my_fused_op", 7, 0, 10),
            kernel("gemm", 7, 5, 15),
            kernel("Memcpy DtoH (Device -> Pageable)", 9, 0, 20, cat="gpu_memcpy"),
        ]
    )

    assert fraction(timeline) == 1.0
    assert timeline.report().memcpy_ns == 20_000


def test_all_hidden_is_not_all_saved(read):
    """Serial: 100 + 50. Side by side both are slower: 145 long, 5 of 50 saved."""
    report = read([kernel("gemm", 7, 0, 145), kernel(COMM, 20, 0, 95)]).report()

    assert report.overlap_fraction == 1.0
    # Of the lone durations (100 and 50) a trace knows nothing: against its own
    # kernels 95 seem saved, so a report has to say both and the contention.
    assert 150_000 - report.step_ns == 5_000


# --- time -------------------------------------------------------------------------


def test_kernels_shorter_than_a_microsecond_count_exactly(read):
    short = [kernel("short", 7, i + 0.3, i + 0.7) for i in range(1000)]

    assert fraction(read([kernel(COMM, 20, 0, 1000), *short])) == 0.4


def test_fractions_of_microseconds_since_1970_are_kept(read):
    base = 1_712_195_495_000_000
    long = kernel(COMM, 20, base, base + 1000)
    short = kernel("short", 7, 0.25, 0.5)
    rows = [
        json.dumps(short).replace('"ts": 0.25', f'"ts": {base + i}.301')
        for i in range(1000)
    ]
    rows = [row.replace('"dur": 0.25', '"dur": 0.4') for row in rows]

    timeline = read(f'{{"traceEvents": [{json.dumps(long)}, {", ".join(rows)}]}}')

    assert fraction(timeline) == 0.4
    assert timeline.spans[1].start_ns == 301
    assert timeline.source.zero_ns == base * 1000


def test_microseconds_are_microseconds_whatever_the_unit_of_display(read):
    events = [kernel(COMM, 20, 1.5, 3.25), kernel("gemm", 7, 2, 9)]

    plain = read(events).report()

    assert plain.step_ns == 7_500
    for fields in (
        {"displayTimeUnit": "ms"},
        {"displayTimeUnit": "ns"},
        {"baseTimeNanoseconds": 1_719_853_884_000_000_000},
    ):
        assert read(events, **fields).report() == plain


def test_time_stamps_may_be_texts(read):
    event = kernel("gemm", 7, 0, 1)

    timeline = read([event, {**event, "ts": "12.5", "dur": "1.25"}])

    assert [(s.start_ns, s.end_ns) for s in timeline.spans] == [
        (0, 1_000),
        (12_500, 13_750),
    ]


def test_impossible_durations_are_dropped_and_counted_by_reason(read):
    good = kernel("gemm", 7, 10, 20)
    without = {key: value for key, value in good.items() if key != "dur"}
    lost = {key: value for key, value in good.items() if key != "ts"}

    timeline = read([good, {**good, "dur": -3}, {**good, "dur": None}, without, lost])

    assert len(timeline.spans) == 1
    assert dict(timeline.source.dropped) == {
        "negative duration": 1,
        "no duration": 2,
        "no time stamp": 1,
    }


def test_begin_and_end_are_a_kernel_too_and_halves_are_counted(read):
    whole = kernel("gemm", 7, 10, 20)
    begin = {k: v for k, v in whole.items() if k != "dur"} | {"ph": "B"}
    end = {"ph": "E", "pid": 0, "tid": 7, "ts": 20}
    open_one = {**begin, "ts": 30, "name": "never ended"}

    timeline = read([begin, end, {**end, "cat": "kernel"}, open_one])

    assert timeline.order() == "0 default gemm 0-10000"
    assert dict(timeline.source.dropped) == {
        "begins and never ends": 1,
        "ends and never began": 1,
    }


def test_rows_at_time_zero_do_not_stretch_the_run(read):
    zero = kernel("gemm", 7, 0, 0)
    events = [kernel("gemm", 7, 10**12 + i, 10**12 + i + 1) for i in range(0, 10, 2)]

    timeline = read([*events, *[zero] * 5])

    assert timeline.report().step_ns == 9_000
    assert timeline.source.dropped == (("time 0 and duration 0", 5),)


def test_events_without_arguments_are_read(read):
    event = kernel("gemm", 7, 0, 10)
    del event["args"]

    assert read([event, {**event, "args": None}, {**event, "args": []}]).order() == (
        "0 default gemm 0-10000\n" * 3
    ).rstrip("\n")


# --- steps ------------------------------------------------------------------------


def steps():
    return [
        annotation("ProfilerStep#1", 0, 15),
        annotation("ProfilerStep#2", 15, 60),
        launch(1, 0, 1),
        launch(2, 1, 2),
        launch(3, 16, 17),
        launch(4, 2, 3),
        kernel(COMM, 20, 0, 10, correlation=1),
        kernel("gemm", 7, 0, 10, correlation=2),
        kernel(COMM, 20, 20, 50, correlation=3),
        kernel("late", 7, 16, 18, correlation=4),
        kernel("unlaunched", 7, 18, 19, correlation=99),
    ]


def test_the_whole_is_the_ratio_of_sums_not_the_mean_of_ratios(read):
    assert fraction(read(steps())) == 0.25


def test_a_kernel_belongs_to_the_step_that_launched_it(read):
    timeline = read(steps())

    assert timeline.steps == (1, 2)
    assert [fraction(timeline.of_step(step)) for step in timeline.steps] == [1.0, 0.0]
    assert "late" in timeline.of_step(1).order()
    assert "late" not in timeline.of_step(2).order()


def test_kernels_without_a_launch_count_in_the_whole_and_are_told(read):
    timeline = read(steps())

    assert timeline.report().compute_ns == 13_000
    assert sum(timeline.of_step(s).report().compute_ns for s in (1, 2)) == 12_000
    remarks = " ".join(timeline.source.remarks)
    assert "GPU events without a launch record in the trace: 1" in remarks
    assert "GPU events that no step launched (the warm-up's, perhaps): 1" in remarks


def test_the_backward_is_what_autograd_s_thread_launched(read):
    engine = {
        **annotation("autograd::engine::evaluate_function: MmBackward0", 10, 20),
        "cat": "cpu_op",
        "tid": 101,
    }
    timeline = read(
        [
            annotation("ProfilerStep#1", 0, 40),
            annotation("train", 8, 22),
            engine,
            launch(1, 2, 3),
            launch(2, 12, 13, thread=101),
            launch(3, 30, 31),
            kernel("forward", 7, 4, 5, correlation=1),
            kernel("backward", 7, 14, 15, correlation=2),
            kernel("optimizer", 7, 32, 33, correlation=3),
        ]
    )

    spans = {s.name: s.attributes for s in timeline.spans if "stream" in s.attributes}
    assert {name: of.get("phase") for name, of in spans.items()} == {
        "forward": "forward",
        "backward": "backward",
        "optimizer": None,
    }
    assert spans["backward"]["label"] == "train"
    assert spans["backward"]["thread"] == 101


# --- ranks ------------------------------------------------------------------------


def test_a_single_file_needs_no_rank(read):
    for fields in ({}, {"distributedInfo": {"backend": "nccl"}}):
        assert read([kernel("gemm", 7, 0, 1)], **fields).spans[0].rank == 0


def test_two_files_of_one_rank_are_an_error_that_names_both(tmp_path):
    for name in ("a.json", "b.json"):
        fields = {"distributedInfo": {"rank": 0}}
        write(tmp_path / name, [kernel("gemm", 7, 0, 1)], **fields)

    with pytest.raises(TraceError, match=r"a\.json and .*b\.json .*rank 0"):
        ol.read_trace(tmp_path)


def test_files_without_ranks_are_numbered_by_their_names_or_order(tmp_path):
    for name in ("rank_3.json", "rank_11.json", "trace-x.json", "trace-y.json"):
        write(tmp_path / name, [kernel(f"of_{name[:-5]}", 7, 0, 1)])

    def ranks(*names):
        timeline = ol.read_trace([tmp_path / name for name in names])
        return {s.name: s.rank for s in timeline.spans}, timeline.source.remarks[0]

    assert ranks("rank_3.json", "rank_11.json") == (
        {"of_rank_3": 3, "of_rank_11": 11},
        "files that name no rank were numbered by their names: rank_3.json 3, "
        "rank_11.json 11",
    )
    assert ranks("trace-x.json", "trace-y.json")[0] == {
        "of_trace-x": 0,
        "of_trace-y": 1,
    }


def test_each_device_of_a_file_is_a_rank_of_its_own(read):
    timeline = read(
        [
            kernel(COMM, 20, 0, 10, device=0),
            kernel("gemm", 7, 0, 10, device=1),
            kernel(COMM, 20, 0, 10, device=1),
        ],
        deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
    )

    ratios = [(r.rank, r.overlap_fraction) for r in timeline.report().ranks]
    assert ratios == [(0, 0.0), (1, 1.0)]
    assert timeline.source.devices == ((0, "A"), (1, "B"))


def test_ranks_of_one_clock_know_when_the_last_had_arrived(tmp_path):
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    for rank, starts in enumerate([(0, 20), (6, 25)]):
        events = [
            kernel(COMM, 20, s, e, **group)
            for s, e in zip(starts, (10, 30), strict=True)
        ]
        write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(tmp_path)

    assert [(s.rank, s.attributes["ready_ns"]) for s in timeline.spans] == [
        (0, 6_000),
        (1, 6_000),
        (0, 25_000),
        (1, 25_000),
    ]
    assert [r.waiting_ns for r in timeline.report().ranks] == [11_000, 0]


def test_a_clock_that_is_off_is_seen_by_the_ends_of_collectives(tmp_path):
    for rank, late in enumerate((0, 5_000)):
        events = [kernel(COMM, 20, s + late, s + late + 10) for s in (0, 20, 40)]
        write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(tmp_path)

    assert timeline.of_rank(0).order() == timeline.of_rank(1).order().replace(
        "1 c", "0 c"
    )
    assert "clock of rank 1 is 5000 us ahead" in " ".join(timeline.source.remarks)


def test_a_folder_is_read_without_what_is_no_trace(tmp_path):
    write(tmp_path / "trace.json", [kernel("gemm", 7, 0, 1)])
    (tmp_path / "notes.txt").write_text("slow today")
    (tmp_path / "settings.json").write_text(json.dumps({"bucket": 25}))

    timeline = ol.read_trace(tmp_path)

    assert timeline.order() == "0 default gemm 0-1000"
    remarks = " ".join(timeline.source.remarks)
    assert "no traces, ignored: notes.txt, settings.json" in remarks
