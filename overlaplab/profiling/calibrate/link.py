"""Collectives by size, and what computing and sending cost one another."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.profiling.calibrate.clock import device_ns, host_ns, on_cuda, sleep
from overlaplab.profiling.calibrate.operators import step_of
from overlaplab.profiling.calibrate.plan import CalibrationPlan

Row = dict[str, Any]
Call = Callable[[], object]
_BEHIND_NS = 40_000_000  # the CPU launches all of a window meanwhile


def measure_collectives(plan: CalibrationPlan) -> list[Row]:
    """Each alone, on the current stream: {"operation", "bytes", "tensors", "ns"}.

    "bytes" as the cost formulas count them: the full tensor, or what is gathered.
    """
    # 2.13 has new names for two of them, which 2.11 does not know.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecated")
    size, rows = dist.get_world_size(), []
    for num_bytes in plan.wire_bytes:
        for name, call in _collectives(num_bytes, size).items():
            rows.append(
                {
                    "operation": name,
                    "bytes": num_bytes,
                    "tensors": 1,
                    "ns": _wire_ns(call, num_bytes, plan),
                }
            )
    for num_tensors, num_bytes in plan.coalesced:
        call = coalesced(num_tensors, num_bytes, wait=False)
        rows.append(
            {
                "operation": "all_reduce",
                "bytes": num_bytes,
                "tensors": num_tensors,
                "ns": _wire_ns(call, num_bytes, plan),
            }
        )
    return rows


def measure_collective_launches(plan: CalibrationPlan) -> Row:
    """CPU time of an asynchronous all-reduce and its wait, by number of tensors."""
    found = {}
    for num_tensors in (1, 16):
        call = coalesced(num_tensors, num_tensors * 4096, wait=True)
        found[str(num_tensors)] = host_ns(call, 20, repeats=plan.repeats)
    return found


def coalesced(num_tensors: int, num_bytes: int, *, wait: bool) -> Call:
    """One averaging all-reduce of several equal tensors, as reducers launch it.

    Args:
        wait: launch it asynchronously and wait; otherwise on the current stream.
    """
    each = max(1, num_bytes // num_tensors // 2)
    tensors = [_tensor(each) for _ in range(num_tensors)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(_average())
    options.asyncOp = wait or not on_cuda()
    group = dist.group.WORLD
    assert group is not None

    def call() -> None:
        work = group.allreduce_coalesced(tensors, options)
        if options.asyncOp:
            work.wait()

    return call


def _wire_ns(call: Call, num_bytes: int, plan: CalibrationPlan) -> int:
    token = _tensor(1)
    return device_ns(
        call,
        20 if num_bytes <= 2**24 else 4,
        repeats=plan.repeats if num_bytes <= 2**27 else 2,
        align=lambda: dist.all_reduce(token),
    )


def _collectives(num_bytes: int, size: int) -> dict[str, Call]:
    full = _tensor(max(size, num_bytes // 2 // size * size))
    shard = _tensor(full.numel() // size)

    def gather() -> None:
        dist.all_gather_into_tensor(full, shard)

    def scatter() -> None:
        dist.reduce_scatter_tensor(shard, full, _average())

    return {
        "all_reduce": lambda: dist.all_reduce(full, _average()),
        "all_gather": gather,
        "reduce_scatter": scatter,
    }


def measure_contention(plan: CalibrationPlan) -> dict[str, Row]:
    """Loops of computing beside all-reduces, for three kinds of computing.

    Returns:
        For "step" (a transformer's), "matmul" and "memory": "compute_alone_ns",
        "compute_beside_ns", "wire_alone_ns", "wire_beside_ns".
    """
    dtype = getattr(torch, plan.dtype)
    side = plan.matmul_beside
    a, b = (torch.randn(side, side, device=streams.device()).to(dtype) for _ in "ab")
    c = torch.empty_like(a)
    source, target = (_tensor(plan.memory_beside // 2) for _ in "st")
    return {
        name: _beside(compute, plan)
        for name, compute in (
            ("step", step_of(plan.contention, plan.dtype)),
            ("matmul", lambda: torch.mm(a, b, out=c)),
            ("memory", lambda: target.copy_(source)),
        )
    }


def _beside(compute: Call, plan: CalibrationPlan) -> Row:
    payload = _tensor(plan.beside_bytes // 2)

    def send() -> None:
        dist.all_reduce(payload, _average())

    alone = device_ns(compute, 3, repeats=plan.repeats, align=_align())
    num_computes = max(1, round(40e6 / alone)) if on_cuda() else 3
    wire = device_ns(send, 4, repeats=plan.repeats, align=_align())
    alone = device_ns(compute, num_computes, repeats=plan.repeats, align=_align())
    # Twice what fits beside it, so that it does not end before the computing does; on
    # all ranks as often.
    num_sends = torch.tensor([2 + 2 * alone * num_computes // max(wire, 1)])
    num_sends = num_sends.to(payload.device)
    dist.all_reduce(num_sends, dist.ReduceOp.MAX)
    if not on_cuda():
        num = min(int(num_sends), 20)
        return _beside_on_cpu(compute, alone, wire, num_computes, payload, num)
    computes, sends = [], []
    for _ in range(plan.repeats):
        window_ns, times = _window(compute, num_computes, send, int(num_sends))
        computes.append(window_ns // num_computes)
        sends += times
    return {
        "compute_alone_ns": alone,
        "compute_beside_ns": sorted(computes)[len(computes) // 2],
        "wire_alone_ns": wire,
        "wire_beside_ns": sum(sends) // max(len(sends), 1),
        "bytes": plan.beside_bytes,
    }


def _window(
    compute: Call, num_computes: int, send: Call, num_sends: int
) -> tuple[int, list[int]]:
    """How long the computing took, and each of the sends that lay within it."""
    main, side = streams.current_stream(), streams.Stream(priority=-1)
    streams.synchronize()
    sleep(_BEHIND_NS)
    side.wait_stream(main)
    marks = [streams.Event(enable_timing=True) for _ in range(num_sends + 1)]
    first, last = (streams.Event(enable_timing=True) for _ in range(2))
    with streams.stream(side):
        _align()()
        marks[0].record()
        main.wait_event(marks[0])
        for mark in marks[1:]:
            send()
            mark.record()
    first.record()
    for _ in range(num_computes):
        compute()
    last.record()
    streams.synchronize()
    end_ms = first.elapsed_time(last)
    at = [first.elapsed_time(mark) for mark in marks]
    within = [
        round((end - begin) * 1e6)
        for begin, end in itertools.pairwise(at)
        if begin >= 0 and end <= end_ms
    ]
    return round(end_ms * 1e6), within


def _beside_on_cpu(
    compute: Call,
    alone: int,
    wire: int,
    num_computes: int,
    payload: torch.Tensor,
    num_sends: int,
) -> Row:
    """Gloo's threads and ours share the cores; the wire's own loss is not measured."""
    works = [
        dist.all_reduce(payload, _average(), async_op=True) for _ in range(num_sends)
    ]
    begin = time.perf_counter_ns()
    for _ in range(num_computes):
        compute()
    beside = (time.perf_counter_ns() - begin) // num_computes
    for work in works:
        work.wait()
    return {
        "compute_alone_ns": alone,
        "compute_beside_ns": beside,
        "wire_alone_ns": wire,
        "wire_beside_ns": wire,
        "bytes": payload.numel() * payload.element_size(),
    }


def _align() -> Call:
    token = _tensor(1)
    return lambda: dist.all_reduce(token)


def _average() -> Any:
    return dist.ReduceOp.AVG if on_cuda() else dist.ReduceOp.SUM


def _tensor(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.bfloat16, device=streams.device())
