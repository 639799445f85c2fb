"""What the CPU pays for launching: operators, hooks, collectives, waits.

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
from typing import Any

import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.calibrate.operators import TimedOperators, build
from overlaplab.calibrate.plan import CalibrationPlan
from overlaplab.techniques.data_parallel import (
    BucketedReducer,
    HookReducer,
    Reducer,
)

Row = dict[str, Any]
_STEPS = 8
_COLUMNS = ("forward_ns", "backward_ns", "step_ns")


def measure_launches(plan: CalibrationPlan, report: Callable[[str], None]) -> Row:
    """The CPU's time of a step: alone, and with each reducer. Collective.

    Args:
        report: called with the name of the stage when it begins.

    Returns:
        "case", "forward_ops", "backward_ops", "parameters", and for each of "variants"
        the medians "forward_ns", "backward_ns" and "step_ns", wait included. Without a
        process group there is no variant but "compute".
    """
    report("launches")
    model, tokens, targets = build(plan.launch_model, plan.dtype)
    with TimedOperators() as timed:
        model(tokens, targets).backward()
    model.zero_grad()
    makers: dict[str, Callable[[nn.Module], Reducer | None]] = {
        "compute": lambda m: None,
    }
    if dist.is_initialized() and dist.get_world_size() > 1:
        makers |= {
            "per parameter": HookReducer,
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
    for reducer in reducers.values():
        if reducer is not None:
            reducer.remove()
    return {
        "case": asdict(plan.launch_model),
        "forward_ops": sum(not backward for _, backward, _, _ in timed.rows),
        "backward_ops": sum(backward for _, backward, _, _ in timed.rows),
        "parameters": sum(1 for _ in model.parameters()),
        "variants": {
            name: {
                key: int(statistics.median(column))
                for key, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
            }
            for name, rows in times.items()
        },
    }
