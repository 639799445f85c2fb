"""Findings that name the true cause, or say that the trace does not show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import overlaplab as ol
from overlaplab import cli
from tests.diagnosis.hand import MIB, compute, launch, send, span, timeline
from tests.diagnosis.ten_traces import TEN, Rank, bucketed, steps, write


def test_a_step_of_1000_us_with_800_of_loading_is_input_bound(tmp_path: Path):
    one = Rank()
    for number in range(3):
        at = 1000 * number
        one.row("user_annotation", f"ProfilerStep#{number + 1}", 100, at, 1000)
        one.row("user_annotation", "enumerate(DataLoader)#X.__next__", 100, at, 800)
        for kernel in range(10):
            number = len(one.events)
            begun = at + 810 + 10 * kernel
            one.row(
                "cuda_runtime", "cudaLaunchKernel", 100, begun, 5, correlation=number
            )
            one.row(
                "kernel", "gemm", 7, begun + 20, 9, correlation=number, device=0,
                stream=7,
            )  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": one.events}))
    found = ol.diagnose(ol.read_trace(tmp_path / "a.json"))
    assert [s.step_ns for s in found.case.steps][1:] == [1_000_000] * 2
    assert [f.kind for f in found.findings] == ["input-bound"]
    assert "num_workers" in found.findings[0].remedy
    assert str(found).startswith("Verdict: input-bound, for 881 us of 1 ms")


def _average(blocking: bool) -> None:
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    model(torch.randn(256, 512)).square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    if blocking:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(2)
        return
    for gradient, work in [(g, dist.all_reduce(g, async_op=True)) for g in gradients]:
        work.wait()
        gradient.div_(2)


@pytest.mark.parametrize("blocking", [True, False])
def test_all_reduces_after_the_backward_are_launched_late_however_they_are_waited_for(
    blocking: bool,
):
    run = ol.run(_average, blocking, hardware="chalk", fake=True)
    found = ol.diagnose(run.timeline).findings
    assert [f.kind for f in found] == ["launched-late"]
    assert "hook" in found[0].remedy and "async_op" not in found[0].remedy
    assert found[0].cost_ns > 600_000


def _small(maker: str) -> list[Any]:
    buckets = [
        send(20 + 4 * i, 24 + 4 * i, bytes=4096, launch=1, label=f"{maker} bucket {i}")
        for i in range(20)
    ]
    large = send(100, 120, bytes=20 * MIB, launch=1)
    mark = compute(20, 22, launch=2, label=maker)
    return [compute(0, 20, launch=0), mark, *buckets, large]


def test_who_uses_a_reducer_is_not_told_to_use_it():
    labels = {"BucketedReducer": "bucket_mib", "DistributedDataParallel.forward": "cap"}
    for label, option in labels.items():
        found = ol.diagnose(timeline(*_small(label))).findings
        (small,) = (f for f in found if f.kind == "small-messages")
        assert option in small.remedy and "Reducer," not in small.remedy
        assert small.remedy.startswith("Raise")


def test_a_run_says_so_of_its_own_reducer_and_of_zero3():
    def step(make: Any) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))
        reducer = make(model)
        with ol.annotate("step"):
            model(torch.ones(8, 32)).sum().backward()
            reducer.wait()

    for make, option in ((ol.HookReducer, "bucket_mib"), (ol.Zero3, "units=")):
        run = ol.run(step, make, hardware="ethernet-100g")
        found = ol.diagnose(run.timeline).findings
        (small,) = (f for f in found if f.kind == "small-messages")
        assert option in small.remedy and "DistributedDataParallel" not in small.remedy


def test_messages_of_a_set_up_are_not_called_small():
    (_, mark, *sent), label = _small("BucketedReducer"), "broadcast parameters"
    spans = [replace(s, attributes={**s.attributes, "label": label}) for s in sent]
    found = ol.diagnose(timeline(compute(0, 20, launch=0), mark, *spans))
    assert "small-messages" not in [f.kind for f in found.findings]
    (remark,) = (remark for remark in found.remarks if "set-up" in remark)
    assert "annotate('step')" in remark and "(21 broadcasts, until 120000 ns)" in remark


def test_a_message_that_gloos_own_thread_runs_does_not_say_when_it_was_launched():
    forward = compute(0, 50, thread=1, phase="forward")
    backward = compute(50, 100, thread=2, phase="backward")
    for thread, kind in ((1, "launched-late"), (7, "one-bucket")):
        spans = [forward, backward, send(101, 140, thread=thread)]
        found = ol.diagnose(timeline(*spans)).findings
        assert found[0].kind == kind


def test_hooks_that_launch_late_are_not_told_to_use_hooks():
    spans = [compute(0, 90, label="BucketedReducer"), send(90, 100), send(100, 110)]
    (late,) = ol.diagnose(timeline(*spans)).findings
    assert late.kind == "launched-late" and "hooks already" in late.remedy


def test_messages_of_one_size_are_not_called_small():
    spans = []
    for at in range(0, 1640, 164):
        spans += [compute(at, at + 125), send(at, at + 164, bytes=25 * MIB)]
    kinds = [f.kind for f in ol.diagnose(timeline(*spans)).findings]
    assert "small-messages" not in kinds


def test_a_wait_is_not_blamed_for_the_loading_behind_it():
    """The CPU waits for the loss, and then loads for 900 us."""
    made = timeline(
        compute(0, 100, launch=0),
        span(0, "cpu", "host", "wait item", 50, 101),
        span(0, "cpu", "host", "load enumerate(DataLoader)", 101, 1000),
        compute(1010, 1100, launch=1005),
    )
    assert [f.kind for f in ol.diagnose(made).findings] == ["input-bound"]


def test_a_step_begins_where_the_one_before_ended_but_not_where_one_is_missing():
    def of_step(number: int, at: float) -> list[Any]:
        return [
            launch(at, at + 5, step=number),
            compute(at + 5, at + 50, step=number, launch=at),
        ]

    made = timeline(*of_step(1, 0), *of_step(2, 900), *of_step(9, 5000))
    found = ol.diagnose(made).case.steps
    assert [s.step_ns for s in found] == [50_000, 900_000, 50_000]


@pytest.mark.parametrize("marked", [True, False])
def test_a_trace_of_cpus_says_what_it_is_and_how_to_record_a_better_one(
    marked: bool, tmp_path: Path
):
    one = Rank()
    one.row("cpu_op", "aten::mm", 100, 0, 1000)
    one.row("cpu_op", "gloo:all_reduce", 200, 500, 900)
    if marked:
        one.row("user_annotation", "ProfilerStep#1", 100, 0, 1500)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": one.events}))
    said = CliRunner().invoke(cli.main, ["report", str(path)])
    assert said.exit_code == cli.NO_COMMUNICATION_CODE
    assert said.output.startswith("Verdict: no GPU events")
    assert "ProfilerActivity.CUDA" in said.output and "ol.profile()" in said.output
    assert "compute" not in said.output.split("No GPU events:")[0]
    assert "Findings" not in said.output


def test_kernels_whose_launches_were_not_recorded_are_described_as_a_whole(
    tmp_path: Path,
):
    path = tmp_path / "a.json"
    events = steps(Rank(), bucketed).events
    for event in events:
        event["args"].pop("correlation", None)
    path.write_text(json.dumps({"traceEvents": events}))

    found = ol.diagnose(ol.read_trace(path))
    (whole,) = found.case.steps
    assert found.has_communication and whole.step is None
    assert whole.hidden_ns > 0 and "None" not in str(found)
    assert any("all numbers are of the whole" in said for said in found.remarks)
    with pytest.raises(ValueError, match=r"step 2: the launches .* not recorded"):
        ol.diagnose(ol.read_trace(path), step=2)


def test_of_a_trace_whose_events_are_all_dropped_nothing_is_said(tmp_path: Path):
    path = tmp_path / "a.json"
    events = steps(Rank(), bucketed).events
    for event in events:
        event["ts"] = "soon"
    path.write_text(json.dumps({"traceEvents": events}))

    shown = CliRunner().invoke(cli.main, ["report", str(path)])
    assert shown.exit_code == cli.NO_COMMUNICATION_CODE
    assert "no event that could be used" in shown.output.splitlines()[0]


@pytest.mark.parametrize("name", ["late launch", "one bucket", "last bucket"])
def test_without_marks_of_steps_nobody_is_told_that_waits_are_blocking(
    name: str, tmp_path: Path
):
    (path,) = write(tmp_path, TEN[name][1]()).iterdir()
    trace = json.loads(path.read_text())
    trace["traceEvents"] = [
        e for e in trace["traceEvents"] if not e["name"].startswith("ProfilerStep#")
    ]
    path.write_text(json.dumps(trace))

    first = ol.diagnose(ol.read_trace(path)).findings[0]
    assert "async_op=False" not in first.says
    assert "does not say which" in first.says
    assert "step() of the profiler" in first.remedy
