"""DDP, FSDP2 and our reducer launch and wait on `virtual` as they do on GPUs.

tests/gpu/orders.json was made by tests/gpu/orders.py from traces of two GPUs.
"""

import json
from pathlib import Path

import pytest

from tests.gpu import orders
from tests.gpu.order_form import END, Token, normal_form, trace_tokens

STORED = json.loads(Path(orders.__file__).with_suffix(".json").read_text())


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*:FutureWarning")
@pytest.mark.parametrize("case", orders.CASES)
def test_collectives_and_waits_are_in_the_order_that_a_gpu_trace_shows(case):
    assert orders.virtual_form(case) == [STORED["cases"][case]] * orders.WORLD_SIZE


def marker(name, stream="main"):
    return Token("marker", stream, name)


SENT = Token("collective", "wire", "all_reduce 4 float32", communicator="world")


def step(*tokens):
    return normal_form([marker(END), *tokens, marker(END)])


def test_a_collective_is_behind_what_its_stream_has_waited_for():
    form = step(
        marker("mm"),
        Token("record", "main", event=1),
        marker("addmm"),
        Token("wait", "wire", event=1),
        SENT,
        Token("record", "wire", event=2),
        marker("gelu"),
        Token("wait", "main", event=2),
        marker("mm"),
    )
    assert form == {
        "operators": "cumsum mm addmm gelu mm cumsum",
        "collectives": [
            "all_reduce 4 float32 on stream 1: launched after 3, behind 2, waited for "
            "before operator 4"
        ],
    }


def test_without_a_wait_nothing_is_behind_a_collective():
    assert step(SENT, marker("mm"))["collectives"] == [
        "all_reduce 4 float32 on stream 1: launched after 1, behind 0, waited for never"
    ]


def test_a_wait_before_the_record_of_its_event_waits_for_nothing():
    early = [Token("wait", "main", event=1), SENT, Token("record", "wire", event=1)]
    assert step(*early)["collectives"][0].endswith("waited for never")


def test_collectives_of_one_communicator_follow_one_another_on_all_streams():
    on_side = Token("collective", "side", "broadcast 4 float32", communicator="world")
    form = step(
        marker("mm"),
        Token("record", "main", event=1),
        Token("wait", "wire", event=1),
        SENT,
        on_side,
    )
    assert [line.split(": ")[1] for line in form["collectives"]] == [
        "launched after 2, behind 2, waited for never",
        "launched after 2, behind 2, waited for never",
    ]


def traced(name, at, category, **args):
    thread = 1 if category in ("cpu_op", "cuda_runtime", "user_annotation") else 0
    event = {"ph": "X", "name": name, "cat": category, "ts": at, "dur": 2.0}
    return event | {"tid": thread, "args": args}


def test_a_trace_tells_markers_collectives_and_waits_by_the_calls_of_the_cpu():
    trace = {
        "traceEvents": [
            traced("aten::mm", 10.0, "cpu_op"),
            traced("cudaLaunchKernel", 11.0, "cuda_runtime", correlation=1),
            traced("gemm", 90.0, "kernel", correlation=1, stream=7),
            traced("event_record 500 0", 13.0, "user_annotation"),
            traced("cudaStreamWaitEvent", 14.0, "cuda_runtime", correlation=2),
            traced("Stream Wait Event", 14.0, "cuda_sync", correlation=2, stream=17),
            traced("event_wait 500 900", 17.0, "user_annotation"),
            traced("cudaLaunchKernelExC", 20.0, "cuda_runtime", correlation=3),
            traced(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                95.0,
                "kernel",
                correlation=3,
                stream=17,
                dtype="Float",
                **{
                    "Collective name": "allreduce",
                    "In msg nelems": 4,
                    "Process Group Name": "0",
                },
            ),
        ]
    }
    assert trace_tokens(trace) == [
        Token("marker", 7, "mm"),
        Token("record", 7, event="500"),
        Token("wait", 17, event="500"),
        Token("collective", 17, "all_reduce 4 float32", communicator="0"),
    ]
