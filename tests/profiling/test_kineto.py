"""A Kineto trace, made by hand, gives the timeline that one can read off it."""

import orjson
import pytest

from overlaplab.errors import TraceError
from overlaplab.profiling.trace.batches import Blocks
from overlaplab.profiling.trace.file import TraceFile, spans_from_trace
from overlaplab.profiling.trace.ranks import timeline_of_ranks


def spans_from(trace):
    return spans_from_trace(orjson.dumps(trace), 0)


def timeline_from(trace):
    return timeline_of_ranks({0: spans_from(trace)}, origin="trace")


def event(category, name, start_us, end_us, *, thread=1, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "tid": thread,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": args,
    }


def facts(timeline):
    return [(s.lane, s.kind, s.name, s.start_ns, s.end_ns) for s in timeline.spans]


def test_of_nested_operators_the_outermost_counts_and_autograd_is_glass():
    trace = {
        "traceEvents": [
            event(
                "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 0, 9
            ),
            event("cpu_op", "AddmmBackward0", 1, 9),
            event("cpu_op", "aten::mm", 2, 6),
            event("cpu_op", "aten::copy_", 3, 4),
            event("cpu_op", "aten::sum", 6, 8),
        ]
    }

    assert facts(timeline_from(trace)) == [
        ("default", "compute", "mm", 0, 4000),
        ("default", "compute", "sum", 4000, 6000),
    ]


def test_views_and_composite_operators_are_not_computation_but_what_is_inside_is():
    trace = {
        "traceEvents": [
            event("cpu_op", "aten::linear", 0, 10),
            event("cpu_op", "aten::t", 1, 2),
            event("cpu_op", "aten::addmm", 3, 9),
            event("cpu_op", "aten::view", 11, 12),
            event("cpu_op", "aten::contiguous", 13, 20),
            event("cpu_op", "aten::clone", 14, 19),
        ]
    }

    timeline = timeline_from(trace)

    assert [s.name for s in timeline.spans] == ["addmm", "clone"]


def test_operators_of_another_thread_count_too():
    trace = {
        "traceEvents": [
            event("cpu_op", "aten::mm", 0, 10, thread=1),
            event("cpu_op", "aten::mm", 2, 8, thread=2),
        ]
    }

    assert timeline_from(trace).report().compute_ns == 10_000


def test_gloo_transfers_are_communication_with_the_launch_s_label_group_and_bytes():
    trace = {
        "traceEvents": [
            event(
                "user_annotation", "overlaplab::launch all_reduce|default|0|64|b0", 0, 1
            ),
            event("user_annotation", "overlaplab::launch all_reduce|tp|0|32|", 1, 2),
            event("user_annotation", "gloo:all_reduce", 1, 6, thread=7),
            event("user_annotation", "gloo:all_reduce", 2, 9, thread=8),
            event("cpu_op", "aten::mm", 2, 4),
            event("user_annotation", "overlaplab::wait all_reduce", 4, 9),
        ]
    }

    timeline = timeline_from(trace)

    communication = [s for s in timeline.spans if s.kind == "communication"]
    assert [(s.lane, s.bytes, s.attributes.get("label")) for s in communication] == [
        ("comm", 64, "b0"),
        ("comm:tp", 32, None),
    ]
    assert [s.name for s in timeline.spans if s.lane == "cpu"] == [
        "launch all_reduce",
        "launch all_reduce",
        "wait all_reduce",
    ]
    report = timeline.report()
    assert (report.communication_ns, report.hidden_ns) == (8000, 2000)


def gpu_trace():
    return {
        "traceEvents": [
            event("user_annotation", "ProfilerStep#3", 0, 100),
            event("user_annotation", "forward", 0, 10),
            event("user_annotation", "bucket 2", 12, 15),
            event("cpu_op", "aten::mm", 1, 5, **{"External id": 41}),
            event("cpu_op", "record_param_comms", 12, 15, dtype="Float",
                  **{"External id": 42, "Collective name": "allreduce",
                     "In msg nelems": 8, "Process Group Description": "default_pg"}),
            event("cuda_runtime", "cudaLaunchKernel", 2, 4, correlation=1),
            event("cuda_runtime", "cudaLaunchKernelExC", 13, 14, correlation=2),
            event("cuda_runtime", "cudaMemcpyAsync", 16, 17, correlation=3),
            event("cuda_runtime", "cudaStreamSynchronize", 20, 60),
            event("kernel", "ampere_sgemm_128x64_nn", 10, 40, thread=7, stream=7,
                  correlation=1, **{"External id": 41}),
            event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 30, 55,
                  thread=20, stream=20, correlation=2, **{"External id": 42}),
            event("gpu_memcpy", "Memcpy DtoH", 56, 58, thread=7, stream=7,
                  correlation=3, bytes=64),
            # The GPU's copy of a range is neither computation nor communication.
            event("gpu_user_annotation", "nccl:all_reduce", 30, 55, thread=20),
        ]
    }  # fmt: skip


def test_kernels_go_to_the_lane_of_their_stream_and_nccl_to_the_communicator_s():
    assert facts(timeline_from(gpu_trace())) == [
        ("cpu", "launch", "launch mm", 0, 2000),
        ("default", "compute", "mm", 8000, 38000),
        ("cpu", "launch", "launch all_reduce", 11000, 12000),
        ("cpu", "launch", "launch memcpy", 14000, 15000),
        ("cpu", "host", "wait cudaStreamSynchronize", 18000, 58000),
        ("comm", "communication", "all_reduce", 28000, 53000),
        ("default", "memcpy", "memcpy", 54000, 56000),
    ]


def test_a_kernel_carries_the_range_and_step_in_which_it_was_launched():
    spans = {s.name: s for s in timeline_from(gpu_trace()).spans}

    assert spans["mm"].attributes["label"] == "forward"
    assert spans["all_reduce"].attributes["label"] == "bucket 2"
    assert spans["all_reduce"].attributes["step"] == 3
    assert (spans["memcpy"].bytes, spans["all_reduce"].bytes) == (64, 32)


def test_only_communication_beside_computation_is_hidden():
    report = timeline_from(gpu_trace()).report()

    assert (report.hidden_ns, report.exposed_ns) == (10_000, 15_000)


def test_the_base_time_puts_ranks_on_one_clock():
    def trace(base_ns):
        return {
            "baseTimeNanoseconds": base_ns,
            "traceEvents": [event("cpu_op", "aten::mm", 1, 2)],
        }

    first, second = (spans_from(trace(base))[0] for base in (0, 5_000))

    assert second.start_ns - first.start_ns == 5_000


def test_what_starts_outside_a_run_s_own_range_is_left_out():
    trace = {
        "traceEvents": [
            event("cpu_op", "aten::mm", 0, 5),
            event("user_annotation", "overlaplab::run", 10, 20),
            event("cpu_op", "aten::add", 12, 13),
            event("cpu_op", "aten::mul", 21, 22),
        ]
    }

    assert [s.name for s in timeline_from(trace).spans] == ["add"]


def test_the_rank_is_the_one_that_the_trace_names():
    trace = {
        "distributedInfo": {"rank": 2},
        "traceEvents": [event("cpu_op", "aten::mm", 0, 5)],
    }

    assert TraceFile(Blocks.of_text(orjson.dumps(trace))).rank == 2


def test_a_dict_that_is_no_trace_is_refused():
    with pytest.raises(TraceError, match="JSON without 'traceEvents'"):
        timeline_from({"events": []})
