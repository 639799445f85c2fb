"""Collectives by size, and what computing and sending cost one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.calibrate.clock import device_ns, on_cuda, sleep
from overlaplab.calibrate.operators import step_of
from overlaplab.calibrate.plan import CalibrationPlan

Row = dict[str, Any]
Call = Callable[[], object]
_IN_A_ROW = 16  # so that several sends lie beside them
_AHEAD_NS = 40_000_000  # the CPU launches meanwhile


def measure_link(plan: CalibrationPlan, report: Callable[[str], None]) -> Row:
    """All-reduces and what they cost beside computing. Collective; 2 ranks or more.

    Args:
        report: called with the name of each stage when it begins.

    Returns:
        "num_ranks"; "collectives", rows {"operation", "bytes", "tensors", "ns"} of each
        alone on the current stream; "contention": of a transformer's steps beside
        all-reduces, as `_beside` gives it, "step", and "small" rows of small ones.
    """
    report("collectives")
    found: Row = {
        "num_ranks": dist.get_world_size(),
        "collectives": [
            {
                "operation": "all_reduce",
                "bytes": num_bytes,
                "tensors": num_tensors,
                "ns": device_ns(
                    _all_reduce(num_tensors, num_bytes),
                    20 if num_bytes <= 2**24 else 4,
                    repeats=plan.repeats if num_bytes <= 2**27 else 2,
                    align=_align(),
                ),
            }
            for num_tensors, num_bytes in (
                *((1, num_bytes) for num_bytes in plan.wire_bytes),
                *plan.coalesced,
            )
        ],
    }
    report("computing beside collectives")
    step = step_of(plan.contention, plan.dtype)
    found["contention"] = {
        "step": _beside(step, plan.beside_bytes, plan),
        "small": [_beside(step, size, plan) for size in plan.small_beside_bytes],
    }
    return found


def _all_reduce(num_tensors: int, num_bytes: int) -> Call:
    """Averages one tensor, or several equal ones in one call, as reducers launch it."""
    if num_tensors == 1:
        return partial(dist.all_reduce, _tensor(num_bytes // 2), _average())
    tensors = [_tensor(num_bytes // num_tensors // 2) for _ in range(num_tensors)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(_average())
    options.asyncOp = not on_cuda()
    group = dist.group.WORLD
    assert group is not None

    def call() -> None:
        work = group.allreduce_coalesced(tensors, options)
        if options.asyncOp:
            work.wait()

    return call


def _beside(compute: Call, num_bytes: int, plan: CalibrationPlan) -> Row:
    """Both loops alone and both at once, each long enough for the card to get hot.

    Returns:
        "compute_alone_ns", "compute_beside_ns", "wire_alone_ns", "bytes" and
        "wire_beside_median_ns": the mean has what the ranks wait for one another.
    """
    payload = _tensor(num_bytes // 2)
    send = partial(dist.all_reduce, payload, _average())
    send()
    wire = device_ns(send, 8, repeats=plan.repeats, align=_align())
    alone = device_ns(compute, 3, repeats=2, align=_align())
    per_compute = _same_everywhere(1 + alone // max(wire, 1))
    rounds = _same_everywhere(max(2, plan.hot_ns // max(alone, 1)))
    if not on_cuda():
        sends = min(per_compute, 20)
        return _beside_on_cpu(compute, alone, wire, payload, sends)
    alone, _ = _window(compute, rounds, send, 0)
    # Small ones: as many as the CPU can launch; there the wire need not be full.
    per_compute = min(per_compute, plan.most_sends)
    beside, times = _window(compute, max(3, rounds // 3), send, per_compute)
    # No more than fit: a stream that is full would hold up the launches of the other.
    fit = 1 + beside * len(times) // max(sum(times), 1) if times else per_compute
    per_compute = min(_same_everywhere(fit), plan.most_sends)
    beside, times = _window(compute, rounds, send, per_compute)
    return {
        "compute_alone_ns": alone,
        "compute_beside_ns": beside,
        "wire_alone_ns": wire,
        "wire_beside_median_ns": int(statistics.median(times)) if times else 0,
        "bytes": num_bytes,
    }


def _window(
    compute: Call, rounds: int, send: Call, per_compute: int
) -> tuple[int, list[int]]:
    """The time of a compute, and of each send beside them. The first third warms up.

    For each compute there are as many sends as fit beside it when both are alone. They
    are launched before it and begin with it, so that a send's time, between its own two
    marks, includes no launch and no queue.
    """
    main, side = streams.current_stream(), streams.Stream(priority=-1)
    streams.synchronize()
    _align()()
    sleep(_AHEAD_NS)
    marks: list[tuple[Any, Any]] = []
    first = None
    for number in range(rounds):
        begins = streams.Event(enable_timing=True)
        begins.record(main)
        if number == rounds // 3:
            first = begins
        with streams.stream(side):
            side.wait_event(begins)
            for _ in range(per_compute):
                begin, end = (streams.Event(enable_timing=True) for _ in range(2))
                begin.record()
                send()
                end.record()
                marks.append((begin, end))
        compute()
    last = streams.Event(enable_timing=True)
    last.record(main)
    streams.synchronize()
    assert first is not None
    length_ms = first.elapsed_time(last)
    within = []
    for begin, end in marks:
        begin_ms, end_ms = first.elapsed_time(begin), first.elapsed_time(end)
        if begin_ms >= 0 and end_ms <= length_ms:
            within.append(round((end_ms - begin_ms) * 1e6))
    return round(length_ms * 1e6) // (rounds - rounds // 3), within


def _same_everywhere(number: int) -> int:
    """The largest of the ranks' numbers: all must send as often."""
    both = torch.tensor([number], device=streams.device())
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return int(both.item())


def _beside_on_cpu(
    compute: Call, alone: int, wire: int, payload: torch.Tensor, num_sends: int
) -> Row:
    """Gloo's threads and ours share the cores; the wire's own loss is not measured."""
    works = [
        dist.all_reduce(payload, _average(), async_op=True) for _ in range(num_sends)
    ]
    begin = time.perf_counter_ns()
    for _ in range(3):
        compute()
    beside = (time.perf_counter_ns() - begin) // 3
    for work in works:
        work.wait()
    return {
        "compute_alone_ns": alone,
        "compute_beside_ns": beside,
        "wire_alone_ns": wire,
        "wire_beside_median_ns": wire,
        "bytes": payload.numel() * payload.element_size(),
    }


def _align() -> Call:
    """A small collective: ranks that waited for it start together."""
    return partial(dist.all_reduce, _tensor(1))


def _average() -> Any:
    return dist.ReduceOp.AVG if on_cuda() else dist.ReduceOp.SUM


def _tensor(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.bfloat16, device=streams.device())
