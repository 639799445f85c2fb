"""What the GPU tests of `ol.profile` run on every rank. Importable.

Delay kernels stand for computation: how long they last is known, and whether a
collective lies beside one is decided by the program and not by the machine.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.calibrate.clock import sleep

MIB = 1024 * 1024
SLEEP_NS = 20_000_000  # long against an all-reduce of 128 MiB over any link of a host
STEPS = 2


def known_overlap(events: bool, hidden: bool) -> dict[str, Any]:
    """Steps of one all-reduce each, all of it beside a delay kernel, or none of it.

    Returns:
        `communication_ns`, `hidden_ns` and `compute_ns` of each recorded step, the
        steps' numbers, labels of the collectives, and how many delay kernels there are.
    """
    tensor = torch.ones(32 * MIB, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    with ol.profile(warmup=1, events=events) as profile:
        for number in range(1 + STEPS):
            # The CPU launches all of the step meanwhile. The warm-up goes on for long
            # after the recording has begun.
            sleep(SLEEP_NS if number else 15 * SLEEP_NS)
            with ol.annotate("gradients"):
                work = dist.all_reduce(tensor, async_op=True)
            if hidden:
                sleep(SLEEP_NS)
            work.wait()
            if not hidden:
                sleep(SLEEP_NS)
            profile.step()
    timeline = profile.timeline
    device = timeline.where(lambda s: s.kind in ("compute", "communication"))
    reports = [device.of_step(n).report() for n in timeline.steps]
    return {
        "steps": timeline.steps,
        "communication_ns": [r.communication_ns for r in reports],
        "hidden_ns": [r.hidden_ns for r in reports],
        "compute_ns": [r.compute_ns for r in reports],
        "labels": [
            s.attributes.get("label")
            for s in timeline.spans
            if s.kind == "communication"
        ],
        "num_delays": sum(
            "spin" in str(s.attributes.get("kernel", s.name))
            for s in timeline.spans
            if s.kind == "compute"  # their launches have the name, too
        ),
        "remarks": timeline.source.remarks,
    }


def _training() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    reducer = ol.BucketedReducer(model, bucket_mib=2.0)
    batch = torch.randn(256, 512, device="cuda")

    def step() -> None:
        model.zero_grad()
        with ol.annotate("forward"):
            loss = model(batch).square().mean()
        with ol.annotate("backward"):
            loss.backward()
        reducer.wait()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step, reducer


def events_without_host_wait() -> dict[str, Any]:
    """B09: whether the CPU was still ahead of the device when the step was launched."""
    step, reducer = _training()
    with ol.profile(events=True) as profile:
        sleep(300_000_000)
        slept = torch.cuda.Event()
        slept.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ahead = not slept.query()
    sent = [s for s in profile.timeline.spans if s.kind == "communication"]
    return {
        "ahead": ahead,
        "labels": [s.attributes.get("label") for s in sent],
        "bytes": sum(s.bytes for s in sent),
        "buckets": len(reducer.plan),
        "compute": {s.name for s in profile.timeline.spans if s.kind == "compute"},
        "unseen": [r for r in profile.timeline.source.remarks if "not seen by" in r],
    }


def kineto_labels() -> dict[str, Any]:
    """Whose bucket each kernel of NCCL is, and whether the ranks share a clock."""
    step, reducer = _training()
    with ol.profile(warmup=1, steps=2) as profile:
        for _ in range(4):
            step()
            profile.step()
    both = profile.gather()
    mine = profile.timeline
    return {
        "steps": mine.steps,
        "labels": {
            s.attributes.get("label") for s in mine.spans if s.kind == "communication"
        },
        "buckets": len(reducer.plan),
        "names": {s.name for s in mine.spans if s.kind == "communication"},
        "ranks": None if both is None else sorted({s.rank for s in both.spans}),
        # The same collective of two ranks: both kernels run while it is under way.
        "apart_ns": None if both is None else _furthest_apart(both),
    }


def _furthest_apart(timeline: ol.Timeline) -> int:
    ends = [
        [s.end_ns for s in timeline.of_rank(r).spans if s.kind == "communication"]
        for r in (0, 1)
    ]
    return max(abs(a - b) for a, b in zip(*ends, strict=True))


def late_cpu() -> tuple[str, ...]:
    """Before each launch the device has done all that it was given."""
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    with ol.profile(events=True) as profile:
        for _ in range(3):
            torch.cuda.synchronize()  # a sleep would not do: the peer may be later
            dist.all_reduce(tensor, async_op=True).wait()
    return profile.timeline.source.remarks


def dropped_after_launch() -> bool:
    """Whether events let the allocator have a tensor that NCCL still reads."""
    elements = 4 * MIB
    dist.all_reduce(torch.zeros(1, device="cuda"))
    tensor = torch.full((elements,), dist.get_rank() + 1.0, device="cuda")
    torch.cuda.synchronize()
    with ol.profile(events=True):
        sleep(100_000_000)
        work = dist.all_reduce(tensor, async_op=True)
        address = tensor.data_ptr()
        del tensor
        other = torch.empty(elements, device="cuda")
        reused = other.data_ptr() == address
        work.wait()
    return reused


def cost_of_events() -> dict[str, float]:
    """CPU microseconds of one launch and wait, without and with events."""
    tensor = torch.ones(1024, device="cuda")
    group = dist.group.WORLD
    assert group is not None

    def launch_many() -> float:
        for _ in range(20):
            dist.all_reduce(tensor, async_op=True).wait()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            dist.all_reduce(tensor, async_op=True).wait()
        return (time.perf_counter() - begin) / 200 * 1e6

    plain = launch_many()
    with ol.profile(events=True):
        with_events = launch_many()
    return {"plain_us": plain, "events_us": with_events}
