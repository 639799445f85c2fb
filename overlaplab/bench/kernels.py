"""What the GPU did in one step, kernel by kernel, as a few sums.

Says why one variant is faster: how long kernels of each class took, how much of the
communication was hidden, how long the GPU had nothing to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.cuda.nccl import version as nccl_version
from torch.profiler import ProfilerActivity, profile, record_function

from overlaplab import streams
from overlaplab.profiling.calibrate.clock import sleep

_CLASSES = (
    ("nccl", re.compile(r"nccl", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention", re.IGNORECASE)),
    ("gemm", re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.IGNORECASE)),
    ("copy", re.compile(r"^mem(cpy|set)|catarray", re.IGNORECASE)),
)

_RANGE = "overlaplab::variant "  # names what a profile holds of one variant

Interval = tuple[int, int]


def profile_step(
    step: Callable[[], object], trace: str | None = None
) -> dict[str, Any]:
    """Profile one step on this rank.

    Args:
        step: warmed up. Call on all ranks together.
        trace: where to write the Chrome trace, None for nowhere.

    Returns:
        Milliseconds by class of kernel, `hidden`, `exposed`, `idle` and `span`, and
        each communication kernel as (start, end) from the first kernel on.
    """
    activities = [ProfilerActivity.CPU]
    if streams.device().type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    step()
    streams.synchronize()
    with profile(activities=activities) as profiler:
        step()
        streams.synchronize()
    if trace:
        profiler.export_chrome_trace(trace)
    return summarise(_kernels(_kineto_events(profiler)))


def profile_in_turn(
    steps: Mapping[str, Callable[[], object]], *, num_steps: int, ahead_ns: int = 0
) -> dict[str, dict[str, Any]]:
    """Profile several variants in one session: to start one takes a second.

    Args:
        steps: warmed up; the same names in the same order on all ranks.
        num_steps: of each, in a row.
        ahead_ns: the device sleeps first, so that the CPU, which the profiler slows,
            launches ahead as it does in training.

    Returns:
        For each name `summarise` of its kernels, without "communication_ms"; {} on a
        CPU process.
    """
    if streams.device().type != "cuda":
        return {}
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        for name, step in steps.items():
            step()
            streams.synchronize()
            dist.barrier()
            streams.synchronize()
            with record_function(_RANGE + name):
                if ahead_ns:
                    sleep(ahead_ns)
                for _ in range(num_steps):
                    step()
                streams.synchronize()
    events = _kineto_events(profiler)
    kernels = _kernels(events)
    found = {}
    for event in events:
        if not event.name().startswith(_RANGE):
            continue
        if event.device_type() != DeviceType.CPU:
            continue
        begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
        summary = summarise(k for k in kernels if begin <= k[1] <= end)
        summary.pop("communication_ms", None)
        found[event.name().removeprefix(_RANGE)] = summary
    return found


def _kineto_events(profiler: profile) -> list[Any]:
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    return list(kineto.kineto_results.events())


def _kernels(events: Iterable[Any]) -> list[tuple[str, int, int]]:
    return [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
        and not _is_annotation(event)
        and "spin_kernel" not in event.name()  # our own sleep
    ]


def summarise(kernels: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """Sums over (name, start_ns, end_ns) of one device's kernels.

    >>> summarise([("gemm", 0, 5_000_000), ("ncclKernel", 4_000_000, 8_000_000)])[
    ...     "hidden_ms"
    ... ]
    1.0
    """
    rows = sorted(kernels, key=lambda row: row[1])
    if not rows:
        return {"kernels": 0}
    begin, end = rows[0][1], max(row[2] for row in rows)
    sums: dict[str, int] = {}
    wire: list[Interval] = []
    work: list[Interval] = []
    for name, start, stop in rows:
        kind = next((k for k, pattern in _CLASSES if pattern.search(name)), "other")
        sums[kind] = sums.get(kind, 0) + stop - start
        (wire if kind == "nccl" else work).append((start, stop))
    wire, work = _union(wire), _union(work)
    busy = _length(_union(wire + work))
    hidden = _length(wire) + _length(work) - busy
    return {
        "kernels": len(rows),
        "span_ms": _ms(end - begin),
        "idle_ms": _ms(end - begin - busy),
        "hidden_ms": _ms(hidden),
        "exposed_ms": _ms(_length(wire) - hidden),
        **{f"{kind}_ms": _ms(total) for kind, total in sorted(sums.items())},
        "last_compute_end_ms": _ms(work[-1][1] - begin) if work else 0.0,
        "communication_ms": [(_ms(a - begin), _ms(b - begin)) for a, b in wire],
    }


def _is_annotation(event: Any) -> bool:
    """Ranges that a user or c10d named show up on the device too: no kernels."""
    return bool(event.is_user_annotation()) or event.name().startswith(
        ("nccl:", _RANGE)
    )


def _union(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def _ms(ns: int) -> float:
    return round(ns / 1e6, 4)


def device_description() -> dict[str, Any]:
    """Card, driver and library versions, for the results."""
    found: dict[str, Any] = {"torch": torch.__version__}
    if torch.cuda.is_available():
        import subprocess

        found["card"] = torch.cuda.get_device_name()
        found["num_cards"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
        version: Any = nccl_version
        found["nccl"] = ".".join(map(str, version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
            found["driver"] = answer.stdout.split("\n")[0].strip()
        except (OSError, subprocess.TimeoutExpired):
            found["driver"] = "unknown"
    return found
