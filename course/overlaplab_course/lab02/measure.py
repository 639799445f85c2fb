"""What lab 02 shows of real GPUs: what a stopwatch says of a step, and what it costs.

The step is section 1's: small products, large ones, an all-reduce. Times are in ms, of
the slowest rank, medians of many that were taken in turn; only a process's first steps
happen once. On CPU processes the numbers mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.bench.timing import Step, run_block, slowest
from overlaplab.bench.traces import compare_modes
from overlaplab_course.timing import get_ready, matrix, medians_ms, on_gpu

# kind of step -> how many small and large products
KINDS = {"steady": (0, 20), "small first": (24, 20), "only small": (24, 0)}
ROUNDS, STEPS = 20, 8
GROUPS, CALLS = 5, 10


def measure() -> dict[str, Any]:
    """Everything the lesson prints of GPUs. Collective."""
    rounds = ROUNDS if on_gpu() else 2
    small, large, mib = (256, 2048, 16) if on_gpu() else (8, 32, 1)
    make = partial(make_step, small=small, large=large, mib=mib)
    first = slowest(_one_by_one(make("small first"), CALLS)).step_ns  # before all else
    steps = {kind: make(kind) for kind in KINDS}
    waits = {
        "as it is": steps["small first"],
        "a wait after each operator": make("small first", wait=True),
    }
    answer: dict[str, Any] = {
        "kinds": KINDS,
        "sizes": {"small": small, "large": large, "mib": mib},
        "first steps": _in_ms(first),
        "stopwatches": {k: stopwatches(step, rounds) for k, step in steps.items()},
        "waits": medians_ms(waits, rounds, STEPS),
        "profiles": {k: compare_modes(steps[k]) for k in KINDS if k != "steady"},
        "new groups": {},
    }
    for name in ("bound to its GPU", "made by the first call"):  # last: see new_groups
        try:
            found = new_groups(mib, bound=name == "bound to its GPU")
        except RuntimeError as error:  # the other tables are worth their answers
            found = {"error": str(error)[:500]}
        answer["new groups"][name] = found
    return answer


def make_step(
    kind: str, *, small: int, large: int, mib: int, wait: bool = False
) -> Step:
    """Section 1's step, launched; `wait`: for the GPU, after every operator."""
    inputs = [matrix(size) for size in (small, large)]
    outs = [torch.empty_like(x) for x in inputs]
    gradient = torch.zeros(mib * 2**18, device=streams.device())
    pause: Step = streams.synchronize if wait else _go_on

    def step() -> None:
        for x, out, number in zip(inputs, outs, KINDS[kind], strict=True):
            for _ in range(number):
                torch.mm(x, x, out=out)
                pause()
        dist.all_reduce(gradient)
        pause()

    return step


def _go_on() -> None:
    """What stands in the place of a wait."""


def _clocked(step: Step, calls: int = STEPS, *, wait: bool = True) -> int:
    """A clock around `calls` steps: ns per step; `wait`: for the GPU at both ends."""
    pause: Step = streams.synchronize if wait else _go_on
    pause()
    start = time.perf_counter_ns()
    for _ in range(calls):
        step()
    pause()
    return (time.perf_counter_ns() - start) // calls


def _one_by_one(step: Step, number: int = STEPS) -> list[int]:
    return [_clocked(step, 1) for _ in range(number)]


def stopwatches(step: Step, rounds: int) -> dict[str, float]:
    """What each says of the same step."""
    watches: dict[str, Callable[[Step], list[int]]] = {
        "around": lambda step: [_clocked(step, wait=False)],
        "wait each": _one_by_one,
        "wait at the ends": lambda step: [_clocked(step)],
        "events": partial(run_block, num_steps=STEPS),
    }
    found: dict[str, list[int]] = {name: [] for name in watches}
    for turn in range(rounds + 1):
        for name, watch in watches.items():
            get_ready()
            times = watch(step)
            found[name] += times if turn else []  # the first turn warms up
    medians = [slowest(times).median_ns for times in found.values()]
    return dict(zip(watches, _in_ms(medians), strict=True))


def new_groups(mib: int, *, bound: bool) -> dict[str, Any]:
    """Fresh groups: ms of `new_group`, and of its first collectives, call by call.

    Args:
        bound: to the rank's GPU, so that `new_group` itself sets NCCL up (torch splits
            the world's communicator); otherwise the first collective does.
    """
    world: Any = dist.distributed_c10d._get_default_group()
    gradient = torch.zeros(mib * 2**18, device=streams.device())
    made: list[int] = []
    calls: list[tuple[int, ...]] = []
    before = world.bound_device_id
    world.bound_device_id = before if bound else None
    try:
        for _ in range(GROUPS):
            dist.barrier()
            streams.synchronize()
            start = time.perf_counter_ns()
            group = dist.new_group()
            made.append(time.perf_counter_ns() - start)
            call = partial(dist.all_reduce, gradient, group=group)
            calls.append(slowest(_one_by_one(call, CALLS)).step_ns)
    finally:
        world.bound_device_id = before
    return {
        "groups": GROUPS,
        "new_group": _in_ms([slowest(made).median_ns])[0],
        "calls": _in_ms(statistics.median(each) for each in zip(*calls, strict=True)),
    }


def _in_ms(times_ns: Any) -> list[float]:
    return [round(ns / 1e6, 4) for ns in times_ns]
