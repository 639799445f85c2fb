"""What the CPU pays for launching: operators, hooks, buckets, single calls.

The step of a small transformer is bound by its launches, so the time that the CPU needs
for it is what the launches cost, Python and autograd included.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.calibrate.clock import Call, on_cuda
from overlaplab.calibrate.link import coalesced
from overlaplab.calibrate.operators import TimedOperators, build
from overlaplab.calibrate.plan import CalibrationPlan
from overlaplab.techniques.data_parallel import (
    BucketedReducer,
    HookReducer,
    Reducer,
)

Row = dict[str, Any]
_STEPS = 8
_BUCKETS = 16  # about so many of a model
_TENSORS = 64  # of a call with several
_COLUMNS = ("forward_ns", "backward_ns", "step_ns")


def measure_launches(plan: CalibrationPlan, report: Callable[[str], None]) -> Row:
    """The CPU's time of a step: alone, and with each reducer. Collective.

    Returns:
        "case", "forward_ops", "backward_ops", "parameters", and for each of "variants"
        the medians "forward_ns", "backward_ns" and "step_ns", wait included, and how
        many "buckets" it sends; "calls": nanoseconds of single calls, see `_calls`.
        Without a process group the only variants are "compute" and "hooks", which is
        with a hook of each parameter that does nothing.
    """
    report("launches")
    model, tokens, targets = build(plan.launch_model, plan.dtype)
    with TimedOperators() as timed:
        model(tokens, targets).backward()
    model.zero_grad()
    makers: dict[str, Callable[[nn.Module], Reducer | None]] = {
        "compute": lambda m: None,
        "hooks": _add_hooks,
    }
    if dist.is_initialized() and dist.get_world_size() > 1:
        makers |= {
            "per parameter": HookReducer,
            "buckets": lambda m: BucketedReducer(m, bucket_mib=_mib(m) / _BUCKETS),
            "one bucket": lambda m: BucketedReducer(m, bucket_mib=1e6),
        }
    twins = {name: copy.deepcopy(model) for name in makers}
    reducers = {name: make(twins[name]) for name, make in makers.items()}
    times: dict[str, list[tuple[int, int, int]]] = {name: [] for name in makers}
    clock = time.perf_counter_ns
    gc.collect()
    gc.disable()
    try:
        for round_ in range(plan.launch_rounds + 1):
            for name, twin in twins.items():
                reducer = reducers[name]
                streams.synchronize()
                for step in range(_STEPS + 1):
                    begin = clock()
                    twin.zero_grad()
                    loss = twin(tokens, targets)
                    middle = clock()
                    loss.backward()
                    end = clock()
                    if reducer is not None:
                        reducer.wait()
                    last = clock()
                    if round_ and step:  # the first of each warms up
                        times[name].append((middle - begin, end - middle, last - begin))
    finally:
        gc.enable()
    streams.synchronize()
    buckets = {name: len(r.plan) if r else 0 for name, r in reducers.items()}
    for reducer in reducers.values():
        if reducer is not None:
            reducer.remove()
    return {
        "case": asdict(plan.launch_model),
        "forward_ops": sum(not backward for _, backward, _, _ in timed.rows),
        "backward_ops": sum(backward for _, backward, _, _ in timed.rows),
        "parameters": sum(1 for _ in model.parameters()),
        "calls": _calls(plan.repeats),
        "variants": {
            name: {
                key: int(statistics.median(column))
                for key, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
            }
            | {"buckets": buckets[name]}
            for name, rows in times.items()
        },
    }


def _add_hooks(model: nn.Module) -> None:
    for parameter in model.parameters():
        register: Any = parameter.register_post_accumulate_grad_hook
        register(lambda _: None)


def _mib(model: nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


def _calls(repeats: int) -> dict[str, int]:
    """The CPU's nanoseconds of single calls, by what is called.

    "kernel": an addition to one tensor; "foreach of N": of N in one call; "event": a
    record and a stream's wait for it; "all_reduce of N": N tensors in one call, small
    ones, its `wait` included.
    """
    several = [torch.ones(64, device=streams.device()) for _ in range(_TENSORS)]
    side = streams.Stream()

    def event() -> None:
        done = streams.Event()
        done.record()
        side.wait_event(done)

    calls: dict[str, Call] = {
        "kernel": partial(several[0].add_, 1),
        f"foreach of {_TENSORS}": partial(torch._foreach_add_, several, 1),
        "event": event,
    }
    if dist.is_initialized() and dist.get_world_size() > 1:
        for number in (1, _TENSORS):
            call = coalesced(several[:number], is_async=True)
            calls[f"all_reduce of {number}"] = call
    together = 200 if on_cuda() else 5
    found: dict[str, int] = {}
    for name, call in calls.items():
        times = []
        for _ in range(repeats):
            streams.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(together):
                call()
            times.append((time.perf_counter_ns() - begin) // together)
        found[name] = int(statistics.median(times))
    streams.synchronize()
    return found
