"""What lab 04 shows of real GPUs: collectives by size, waits, windows, small tensors.

Each table holds medians in ms (of the slowest rank's times) of steps that were taken in
turn, with everything else of the table beside them in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.bench.timing import Step, time_in_turn
from overlaplab.capture import capture_step
from overlaplab.torch_versions import all_gather_single, reduce_scatter_single
from overlaplab_course.lab04 import reference
from overlaplab_course.lab04.given import layer_of_size, one_by_one

KIB, MIB = 2**10, 2**20
CALLS = 10  # in one captured graph


@dataclass(frozen=True)
class Plan:
    """How large and how often.

    Args:
        sizes: KiB of the whole tensor, for collectives by size.
        layer: rows, inputs, middle, outputs of the layer of section 3.
        grads: shape of each gradient of the window.
        tokens: of its layers.
        small: how many small tensors, and their bytes.
        rounds, steps: see `time_in_turn`.
    """

    sizes: tuple[int, ...] = (4, 64, *(KIB * mib for mib in (1, 5, 25, 100, 400)))
    layer: tuple[int, int, int, int] = (8192, 4096, 8192, 4096)
    grads: tuple[int, int] = (4096, 4096)
    tokens: tuple[int, ...] = (2048, 1024, 1024, 1024, 12288) * 2
    small: tuple[int, int] = (64, 16 * KIB)
    rounds: int = 8
    steps: int = 6


REHEARSAL = Plan(
    (4, 64), (64, 32, 64, 32), (32, 32), (16, 8, 8, 8, 96) * 2, (8, KIB), 2, 2
)


def measure() -> dict[str, Any]:
    """Every table of the lesson's section on GPUs. Collective.

    Returns:
        "by_size", "captured_by_size": {operation: {bytes: ms}}; "ways", "windows",
        "small": {variant: ms}; "window_peak_bytes": {variant: bytes or None}; and the
        shapes that were used.
    """
    on_gpu = streams.device().type == "cuda"
    plan = Plan() if on_gpu else REHEARSAL
    with torch.no_grad():
        answer = {
            "by_size": by_size(plan),
            "ways": ways(plan),
            "layer": list(plan.layer),
            **windows(plan),
            "grads": list(plan.grads),
            "tokens": list(plan.tokens),
            "small": small(plan),
            "small_tensors": list(plan.small),
        }
        # Last: what cannot be captured here costs no other table.
        answer["captured_by_size"] = captured_by_size(plan) if on_gpu else None
    return answer


def medians_ms(steps: Mapping[str, Step], plan: Plan) -> dict[str, float]:
    """Median step of each variant, all warmed up and then taken in turn."""
    for step in steps.values():
        for _ in range(3):
            step()
    streams.synchronize()
    times = time_in_turn(steps, num_rounds=plan.rounds, steps_a_round=plan.steps)
    return {name: round(t.median_ns / 1e6, 5) for name, t in times.items()}


def dtype() -> torch.dtype:
    """bfloat16 on GPUs; CPUs are slow at it."""
    on_gpu = streams.device().type == "cuda"
    return torch.bfloat16 if on_gpu else torch.float32


def random(*shape: int) -> Tensor:
    """Entries so small that sums of many steps stay finite."""
    return torch.randn(*shape, device=streams.device()).mul_(0.01).to(dtype())


# -- collectives by size


def calls(num_bytes: int) -> dict[str, Callable[[], object]]:
    """Each collective on a tensor of `num_bytes`, waited for on the current stream."""
    n = dist.get_world_size()
    each = num_bytes // dtype().itemsize // n
    whole = torch.zeros(each * n, device=streams.device(), dtype=dtype())
    part = torch.zeros(each, device=streams.device(), dtype=dtype())

    def halves() -> None:
        reduce_scatter_single(part, whole)
        all_gather_single(whole, part)

    return {
        "all_reduce": partial(dist.all_reduce, whole),
        "all_gather": partial(all_gather_single, whole, part),
        "reduce_scatter": partial(reduce_scatter_single, part, whole),
        "reduce_scatter, all_gather": halves,
    }


def by_size(plan: Plan) -> dict[str, dict[str, float]]:
    """operation -> bytes -> ms, launched one by one."""
    found: dict[str, dict[str, float]] = {}
    for size in (KIB * kib for kib in plan.sizes):
        for name, ms in medians_ms(calls(size), plan).items():
            found.setdefault(name, {})[str(size)] = ms
    return found


def captured_by_size(plan: Plan) -> dict[str, Any]:
    """The same without launches: `CALLS` of each in one CUDA graph, ms a call."""
    found: dict[str, Any] = {}
    for size in (KIB * kib for kib in plan.sizes):
        graphs: dict[str, Any] = {}
        for name, call in calls(size).items():
            try:
                graphs[name] = capture_step(partial(_repeat, call))
                for _ in range(8):  # its warm-up, then the capture
                    graphs[name]()
            except Exception as error:
                found["refused"] = f"{name}: {type(error).__name__}: {error}"
                return found
        for name, ms in medians_ms(graphs, plan).items():
            found.setdefault(name, {})[str(size)] = round(ms / CALLS, 6)
        for graph in graphs.values():
            graph.release()
    return found


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


# -- the ways to wait


def ways(plan: Plan) -> dict[str, float]:
    """The layer of section 3, once for each way to wait, and without the message."""
    x, w = layer_of_size(random, *plan.layer)
    other = streams.Stream()
    names = (
        *("no message", "async_op=False", "wait at once", "wait late"),
        *("wait at once, on another stream", "CPU waits at once", "CPU waits late"),
    )
    steps: dict[str, Step] = {n: partial(_layer, x, w, n, other) for n in names}
    steps["the message alone"] = partial(
        dist.all_reduce, random(plan.layer[0], plan.layer[2])
    )
    return medians_ms(steps, plan)


def _layer(x: Tensor, w: Mapping[str, Tensor], way: str, other: Any) -> Tensor:
    current = streams.current_stream()
    part = x @ w["in"]
    work: Any = None
    if way != "no message":
        work = dist.all_reduce(part, async_op=(way != "async_op=False"))
    if way == "wait at once":
        work.wait()
    if way == "CPU waits at once":
        _cpu_waits(work)
    if way == "wait at once, on another stream":
        with streams.stream(other):
            work.wait()
            y = part @ w["out"]
    side = (x @ w["side_in"]).relu() @ w["side_out"]
    if way == "wait late":
        work.wait()
    if way == "CPU waits late":
        _cpu_waits(work)
    if way == "wait at once, on another stream":
        current.wait_stream(other)
        if y.is_cuda:
            y.record_stream(current)  # made on the other stream's memory
    else:
        y = part @ w["out"]
    return y + side


def _cpu_waits(work: Any) -> None:
    while not work.is_completed():
        pass
    work.wait()  # has happened; lets the work give its tensors back


# -- windows


def windows(plan: Plan) -> dict[str, Any]:
    """Exercise 4.4: steps, and the most memory that each variant adds."""
    n, m = plan.grads
    layers = [(random(n, tokens), random(tokens, m)) for tokens in plan.tokens]
    stalling = partial(reference.stalling, layers)
    beside = partial(reference.average_gradients, layers)
    steps: dict[str, Step] = {
        "no message": lambda: [(a @ b).to(torch.bfloat16) for a, b in layers],
        "no limit": partial(stalling, len(layers)),
        "no limit, side stream": partial(beside, len(layers)),
    }
    for k in (1, 2, 3):
        steps[f"stalling, k={k}"] = partial(stalling, k)
        steps[f"side stream, k={k}"] = partial(beside, k)
    message = torch.zeros(n, m, device=streams.device())
    steps["a message alone"] = partial(dist.all_reduce, message)
    return {
        "windows": medians_ms(steps, plan),
        "window_peak_bytes": {name: _peak_bytes(step) for name, step in steps.items()},
    }


def _peak_bytes(step: Step) -> int | None:
    if streams.device().type != "cuda":
        return None
    streams.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    streams.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


# -- small tensors


def small(plan: Plan) -> dict[str, float]:
    """Many small all-reduces: one by one, in one flat tensor, in one group call."""
    number, size = plan.small
    tensors = [random(size // dtype().itemsize) for _ in range(number)]

    def flat() -> None:
        joined = torch.cat(tensors)
        dist.all_reduce(joined)
        torch._foreach_copy_(tensors, list(joined.chunk(number)))

    def coalesced() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()

    steps: dict[str, Step] = {
        "one by one": partial(one_by_one, tensors),
        "one flat tensor": flat,
        "one group call": coalesced,
    }
    return medians_ms(steps, plan)
