"""What lab 02 gives: rows, steps to be timed, stored traces of a GPT on two H200s.

A row is an event as a profiler writes it: it knows no kind (exercise 2.4). Spans are
the package's own reader's. traces/README.md says where the traces come from.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab import streams
from overlaplab.profiling.read import read_trace
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import intersect, merge
from overlaplab_course.lab02.stopwatch import Timed, run_timed

# -- steps that are timed

Step = Callable[[], Any]
WARM_UP_CALLS = 3
_LARGE, _SMALL = 64, 8
# Which products each step launches: (number, width), small ones first.
_SHAPES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "steady": ((10, _LARGE),),
    "cold": ((10, _LARGE),),
    "small first": ((24, _SMALL), (20, _LARGE)),
    "odd": ((10, _LARGE),),
    "training": ((12, _SMALL), (14, _LARGE)),
}


def time_with(time_step: Callable[[Step], Any], kind: str = "training") -> Timed:
    """Let `time_step(step)` time a training step on two ranks.

    Args:
        kind: "steady", "cold", "small first", "odd", or "training", which is cold,
            begins with small kernels and has odd steps.

    Returns:
        (what it returned, how often it called the step) of rank 0, and the timeline.
    """
    return run_timed(_time_on_rank, time_step, kind)


def _time_on_rank(time_step: Callable[[Step], Any], kind: str) -> tuple[Any, int]:
    """The step is one in miniature: products, then a message."""
    with _disable_current_modes():
        inputs = {width: torch.eye(width) for width in (_LARGE, _SMALL)}
        gradient = torch.ones(256, 256)
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        times = 1
        if kind in ("cold", "training") and calls <= WARM_UP_CALLS:
            times = 4  # communicators are set up, kernels are tried out
        elif kind in ("odd", "training"):  # a checkpoint is written; a step is skipped
            times = {5: 5, 0: 0}.get(calls % 7, 1)
        for number, width in times * _SHAPES[kind]:
            for _ in range(number):
                _ = inputs[width] @ inputs[width]
        if times:
            dist.all_reduce(gradient)

    return time_step(step), calls


# (products, elements of the message) of the steps of 2.8a: hidden in full, for the most
# part, for the less.
PROFILED = ((8, 256 * 256), (8, 1024 * 1024), (3, 1024 * 1024))
ProfileStep = Callable[[Callable[[], Any], Callable[[], Any]], Mapping[str, float]]


def profile_with(profile_step: ProfileStep, case: int = 1) -> Timed:
    """Let `profile_step(compute, send)` time one of the three steps, on two ranks.

    Returns:
        (what it returned, how often it called each) of rank 0, and the timeline.
    """
    return run_timed(_profile_on_rank, profile_step, *PROFILED[case])


def _profile_on_rank(
    profile_step: ProfileStep, num_products: int, num_elements: int
) -> tuple[Any, dict[str, int]]:
    """A step with a queue before it: the CPU is ahead, as in training."""
    with _disable_current_modes():
        a = torch.eye(64)
        gradient = torch.ones(num_elements)
    for _ in range(12):
        _ = a @ a
    calls = {"compute": 0, "send": 0}

    def compute() -> None:
        calls["compute"] += 1
        with streams.annotate("compute"):
            for _ in range(num_products):
                _ = a @ a

    def send() -> Any:
        calls["send"] += 1
        with streams.annotate("send"):
            return dist.all_reduce(gradient, async_op=True)

    returned = profile_step(compute, send)
    streams.synchronize()
    return returned, calls


def truth(timeline: Timeline) -> dict[str, float]:
    """What happened on rank 0 in a step of `profile_with`, in ms."""
    own = timeline.of_rank(0).where(
        lambda s: s.kind in ON_GPU and s.attributes.get("label") in ("compute", "send")
    )
    report = own.report()
    names = ("compute", "communication", "hidden")
    return {f"{name}_ms": getattr(report, f"{name}_ns") / 1e6 for name in names}


# -- rows


class Row(NamedTuple):
    """One event of a trace.

    Args:
        name: as the profiler wrote it.
        category: "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation" (a range
            of the user's, drawn on the GPU), "cpu_op", "cuda_runtime".
        stream: number of the GPU's stream; of an event of the CPU, its thread.
        start_ns, end_ns: integers.
        args: what else the profiler knows.
    """

    name: str
    category: str
    stream: int
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = MappingProxyType({})


# -- stored traces

FOLDER = Path(__file__).with_name("traces")
# What each trace is of: gradients in buckets of 100 MiB, or all at once at the end.
TRACES: Mapping[str, str] = {
    "serial, batch 8": "serial_b8.json.gz",
    "overlapped, batch 8": "ours_b8.json.gz",
    "overlapped, batch 2": "ours_b2.json.gz",
}
ON_GPU = ("compute", "communication", "memcpy", "memset")


def path_of(which: str) -> Path:
    """The file of one of `TRACES`.

    Raises:
        ValueError: there is none of that name.
    """
    if which not in TRACES:
        raise ValueError(f"no trace {which!r}; there are {list(TRACES)}")
    return FOLDER / TRACES[which]


@lru_cache(maxsize=8)
def whole_trace(which: str) -> Timeline:
    """All steps of one of `TRACES`, as `ol.read_trace` gives them."""
    return read_trace(path_of(which))


@lru_cache(maxsize=8)
def raw_rows(which: str) -> tuple[Row, ...]:
    """The events of one of `TRACES` as rows, kernels and all others."""
    return rows_of(path_of(which))


def rows_of(path: str | Path) -> tuple[Row, ...]:
    """The events of a trace of torch.profiler as rows; from 0, in ns.

    Args:
        path: of a file, `.json` or `.json.gz`.
    """
    read = gzip.open if str(path).endswith(".gz") else open
    with read(path, "rb") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    first_ns, rows = min(round(1000 * e["ts"]) for e in events), []
    for e in events:
        if "cat" in e:
            args, start_ns = e.get("args", {}), round(1000 * e["ts"]) - first_ns
            stream = args.get("stream", e["tid"])
            number = stream if isinstance(stream, int) else -1
            end_ns = start_ns + round(1000 * e["dur"])
            rows.append(Row(e["name"], e["cat"], number, start_ns, end_ns, args))
    return tuple(rows)


@lru_cache(maxsize=8)
def whole_steps(which: str) -> Timeline:
    """What the whole steps of one of `TRACES` launched: nothing that leaked in."""
    whole = whole_trace(which)
    return Timeline.of(s for n in whole.steps for s in whole.of_step(n).spans)


@lru_cache(maxsize=8)
def step_rows(which: str) -> tuple[Row, ...]:
    """The rows of one of `TRACES` from the first GPU event of its first whole step on.

    What a step before launched may still run when the profiler starts: it leaks in.
    """
    rows = raw_rows(which)
    whole_ns = first_ns(whole_trace(which), ("compute", "communication"))
    leaked_ns = first_ns(whole_steps(which)) - whole_ns
    from_ns = min(r.start_ns for r in rows if r.category == "kernel") + leaked_ns
    return tuple(row for row in rows if row.start_ns >= from_ns)


def first_ns(timeline: Timeline, kinds: Sequence[str] = ON_GPU) -> int:
    """The start of the first span of these kinds."""
    return min(s.start_ns for s in timeline.spans if s.kind in kinds)


@lru_cache(maxsize=32)
def trace_step(which: str, number: int = 0, *, cpu: bool = False) -> Timeline:
    """One step of one of `TRACES`: what it launched, from its first GPU event at 0.

    Args:
        number: a learner's; draws one of the steps.
        cpu: keep the CPU's launches too, which may begin long before 0.

    Returns:
        Messages have the attribute "launch_ns": when the CPU began to launch them.
    """
    whole = whole_trace(which)
    step = whole.of_step(whole.steps[int(number) % len(whole.steps)])
    zero_ns = first_ns(step)

    def shifted(span: Span) -> Span:
        attributes = dict(span.attributes)
        if "launch_ns" in attributes:
            attributes["launch_ns"] -= zero_ns
        start_ns, end_ns = span.start_ns - zero_ns, span.end_ns - zero_ns
        return replace(span, start_ns=start_ns, end_ns=end_ns, attributes=attributes)

    return Timeline.of(shifted(s) for s in step.spans if cpu or s.kind in ON_GPU)


def messages_of(step: Timeline) -> list[Span]:
    """The messages of a timeline, by start."""
    return [s for s in step.spans if s.kind == "communication"]


def both_steps(number: int) -> tuple[Timeline, Timeline]:
    """(serial, overlapped): the steps of a learner's number, at batch 8.

    All messages at the end, or in buckets beside the backward pass.
    """
    names = ("serial, batch 8", "overlapped, batch 8")
    serial, overlapped = (trace_step(name, number) for name in names)
    return serial, overlapped


def pairs(serial: Timeline, overlapped: Timeline) -> list[tuple[Span, Span, bool]]:
    """(alone, the same kernel in the overlapped step, whether a message runs beside).

    Both launch the same kernels in the same order: the n-th belongs to the n-th.

    Raises:
        ValueError: the two did not launch the same kernels.
    """
    alone, after = (
        [s for s in step.spans if s.kind == "compute"] for step in (serial, overlapped)
    )
    if [s.name for s in alone] != [s.name for s in after]:
        raise ValueError("the two steps did not launch the same kernels in one order")
    sent = merge((s.start_ns, s.end_ns) for s in messages_of(overlapped))
    return [
        (a, b, bool(intersect([(b.start_ns, b.end_ns)], sent)))
        for a, b in zip(alone, after, strict=True)
    ]
