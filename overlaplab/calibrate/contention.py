"""What computing and sending cost one another: of a whole step, and by kind of kernel.

Two endless loops run beside one another: kernels on one stream, all-reduces on another,
with or without priority, which is what a communicator's own stream has or has not. Each
is timed alone as well, long enough for the card to get hot.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlaplab import streams
from overlaplab.calibrate.clock import Call, device_ns, on_cuda, sleep
from overlaplab.calibrate.link import align, average, measure_link, tensor
from overlaplab.calibrate.operators import step_of
from overlaplab.calibrate.plan import CalibrationPlan, ModelCase
from overlaplab.hardware.kinds import KINDS

Row = dict[str, Any]
_AHEAD_NS = 40_000_000  # the CPU launches meanwhile
_HIGH, _DEFAULT = -1, 0  # priorities of a stream


def measure_between(plan: CalibrationPlan, report: Callable[[str], None]) -> Row:
    """All that needs a link: `measure_link`, and "contention". Collective."""
    found = measure_link(plan, report)
    return {**found, "contention": measure_contention(plan, report)}


def measure_contention(plan: CalibrationPlan, report: Callable[[str], None]) -> Row:
    """What a transformer's steps and its kernels by kind cost all-reduces, and v.v.
    Collective; 2 ranks or more.

    Returns:
        "step": steps beside large all-reduces; "small": rows of them beside small ones,
        both at high priority; "kinds": rows of one kind of kernel over and over, with
        "kind" and "high_priority", beside all-reduces of the largest of the small and
        of the large size. Each row as `_beside` gives it.
    """
    report("computing beside collectives")
    step = step_of(plan.contention, plan.dtype)
    found: Row = {
        "step": _beside(step, plan.beside_bytes, plan),
        "small": [_beside(step, size, plan) for size in plan.small_beside_bytes],
        "kinds": [],
    }
    del step
    priorities = (_DEFAULT, _HIGH) if on_cuda() else (_DEFAULT,)
    sizes = plan.small_beside_bytes[-1], plan.beside_bytes
    for kind, kernel in _kernels(plan.contention, plan.dtype).items():
        report(f"{kind} kernels beside collectives")
        alone_ns = device_ns(kernel, 3, repeats=plan.repeats, align=align())
        in_a_row = _same_everywhere(1 + plan.beside_ns // max(alone_ns, 1))
        compute = partial(_repeat, kernel, in_a_row)
        for priority in priorities:
            for size in sizes:
                row = _beside(compute, size, plan, priority=priority)
                of = {"kind": kind, "high_priority": priority == _HIGH}
                found["kinds"].append({**of, "kernels": in_a_row, **row})
    return found


def _kernels(case: ModelCase, dtype: str) -> dict[str, Call]:
    """Kernels of a layer of `case`, by kind; each call launches one or a few.

    The kinds are those of `overlaplab.hardware.kernel_kind`.
    """
    rows, width = case.batch * case.tokens, case.d_model
    heads = case.batch, case.num_heads, case.tokens, width // case.num_heads

    def new(*shape: int) -> torch.Tensor:
        random = torch.randn(shape, device=streams.device())
        return random.to(getattr(torch, dtype))

    narrow, wide, weight = new(rows, width), new(rows, 4 * width), new(width, 4 * width)
    product = torch.empty_like(wide)
    query, key, value, slope = (new(*heads) for _ in range(4))
    inputs = [query, key, value]
    with torch.enable_grad():
        for one in inputs:
            one.requires_grad_()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    backward = partial(torch.autograd.grad, attended, inputs, slope, retain_graph=True)

    def attention() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(query, key, value, is_causal=True)

    calls: tuple[Call, ...] = (
        partial(torch.mm, narrow, weight, out=product),
        attention,
        backward,
        partial(F.layer_norm, narrow, (width,)),
        partial(torch.add, wide, product, out=product),
    )
    return dict(zip(KINDS, calls, strict=True))


def _repeat(call: Call, num_calls: int) -> None:
    for _ in range(num_calls):
        call()


def _beside(
    compute: Call, num_bytes: int, plan: CalibrationPlan, *, priority: int = _HIGH
) -> Row:
    """Both loops alone and both at once, each long enough for the card to get hot.

    Returns:
        "bytes"; "compute_alone_ns", "wire_alone_ns" of one alone; both at once
        "compute_beside_ns", "wire_beside_median_ns" (the mean has what the ranks wait
        for one another) and "wire_busy_ns": for how much of "compute_beside_ns" an
        all-reduce ran or waited for room.
    """
    payload = tensor(num_bytes // 2)
    send = partial(dist.all_reduce, payload, average())
    send()
    wire = device_ns(send, 8, repeats=plan.repeats, align=align())
    alone = device_ns(compute, 3, repeats=2, align=align())
    per_compute = _same_everywhere(1 + alone // max(wire, 1))
    rounds = _same_everywhere(max(2, plan.hot_ns // max(alone, 1)))
    if not on_cuda():
        sends = min(per_compute, plan.most_sends)
        return _beside_on_cpu(compute, alone, wire, payload, sends)
    side = streams.Stream(priority=priority)
    alone, _ = _window(compute, rounds, side, send, 0)
    # Small ones: as many as the CPU can launch; there the wire need not be full.
    per_compute = min(per_compute, plan.most_sends)
    beside, times = _window(compute, max(3, rounds // 3), side, send, per_compute)
    # No more than fit: a stream that is full would hold up the launches of the other.
    fit = 1 + beside * len(times) // max(sum(times), 1) if times else per_compute
    per_compute = min(_same_everywhere(fit), plan.most_sends)
    beside, times = _window(compute, rounds, side, send, per_compute)
    return {
        "bytes": num_bytes,
        "compute_alone_ns": alone,
        "compute_beside_ns": beside,
        "wire_alone_ns": wire,
        "wire_beside_median_ns": int(statistics.median(times)) if times else 0,
        "wire_busy_ns": sum(times) // (rounds - rounds // 3),
    }


def _window(
    compute: Call, rounds: int, side: Any, send: Call, per_compute: int
) -> tuple[int, list[int]]:
    """The time of a compute, and of each send beside them. The first third warms up.

    For each compute there are as many sends as fit beside it when both are alone. They
    are launched before it and begin with it, so that a send's time, between its own two
    marks, includes no launch and no queue.
    """
    main = streams.current_stream()
    streams.synchronize()
    align()()
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
        dist.all_reduce(payload, average(), async_op=True) for _ in range(num_sends)
    ]
    begin = time.perf_counter_ns()
    for _ in range(3):
        compute()
    beside = (time.perf_counter_ns() - begin) // 3
    for work in works:
        work.wait()
    return {
        "bytes": payload.numel() * payload.element_size(),
        "compute_alone_ns": alone,
        "compute_beside_ns": beside,
        "wire_alone_ns": wire,
        "wire_beside_median_ns": wire,
        "wire_busy_ns": beside,
    }
