"""Public reports of profilers that said something else than what had happened.

Times are microseconds; each test has the smallest trace that shows the fault.
"""

import json

import pytest

import overlaplab as ol
from overlaplab.profiling.trace.names import COMMUNICATION
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
            kernel("ncclSymkDevKernel_AllGather_LL(ncclSymkArgs)", 20, 40, 45),
            kernel("ncclSymDevKernel_AllGather_LL(ncclSymArgs)", 20, 45, 50),
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


def test_names_count_whatever_their_letters(read):
    timeline = read(
        [kernel("NCCLDEVKERNEL_AllReduce", 20, 0, 10), kernel("G", 7, 5, 9)]
    )

    assert fraction(timeline) == 0.4
    assert all(pattern == pattern.lower() for pattern in COMMUNICATION)


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
    serial = read([kernel("gemm", 7, 0, 100), kernel(COMM, 20, 100, 150)]).report()
    beside = read([kernel("gemm", 7, 0, 145), kernel(COMM, 20, 0, 95)]).report()

    assert beside.overlap_fraction == 1.0
    assert serial.step_ns - beside.step_ns == 5_000
    assert serial.serial_ns - serial.bound_ns == 50_000  # that could be saved


def test_amd_s_calls_and_copies_are_read_as_nvidia_s(read):
    timeline = read(
        [
            launch(1, 0, 1, name="hipLaunchKernel"),
            launch(2, 1, 2, name="hipExtModuleLaunchKernel"),
            launch(3, 2, 3, name="hipMemcpyAsync"),
            launch(4, 3, 9, name="hipDeviceSynchronize"),
            launch(5, 9, 10, name="hipGetDevice"),
            kernel("Cijk_Alik_Bljk_BBS_BH", 0, 2, 6, correlation=1),
            kernel("ncclDevKernel_Generic(ncclDevComm*)", 1, 4, 8, correlation=2),
            kernel("CopyHostToDevice", 0, 6, 7, correlation=3, cat="gpu_memcpy"),
        ]
    )

    assert timeline.order() == (
        "0 cpu launch Cijk_Alik_Bljk_BBS_BH 0-1000\n"
        "0 cpu launch ncclDevKernel_Generic 1000-2000\n"
        "0 cpu launch memcpy 2000-3000\n"
        "0 default Cijk_Alik_Bljk_BBS_BH 2000-6000\n"
        "0 cpu wait hipDeviceSynchronize 3000-9000\n"
        "0 comm ncclDevKernel_Generic 4000-8000\n"
        "0 default memcpy 6000-7000"
    )


def test_categories_of_the_first_versions_are_known(read):
    old = {"ph": "X", "name": "gemm", "ts": 5, "dur": 2, "tid": 0}

    for row in ({"cat": "Kernel", "pid": 0}, {"pid": "CUDA functions"}):
        assert read([{**old, **row}]).order() == "0 default gemm 0-2000"


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
