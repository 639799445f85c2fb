"""What lab 04 shows of real GPUs: collectives by size, waits, windows, small tensors.

Each table holds medians in ms (of the slowest rank's times) of steps that were taken in
turn, with everything else of the table beside them in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.bench.timing import Step
from overlaplab.capture import capture_step
from overlaplab.torch_versions import all_gather_single, reduce_scatter_single
from overlaplab_course.lab04 import reference
from overlaplab_course.lab04.given import SIZES, layer_of_size, one_by_one
from overlaplab_course.timing import dtype, medians_ms, on_gpu

CALLS = 10  # in one captured graph
Sizes = Mapping[str, Any]


def measure() -> dict[str, Any]:
    """Every table of the lesson's section on GPUs. Collective.

    Returns:
        "by_size", "captured_by_size": {operation: {bytes: ms}}; "ways", "windows",
        "small": {variant: ms}; "window_peak_bytes": {variant: bytes or None}; and the
        shapes that were used.
    """
    sizes = SIZES["gpus" if on_gpu() else "rehearsal"]
    with torch.no_grad():
        return {
            "by_size": by_size(sizes),
            "ways": ways(sizes),
            **windows(sizes),
            "small": small(sizes),
            "small_tensors": sizes["small"],
            **{name: sizes[name] for name in ("layer", "grads", "tokens")},
            # Last: what cannot be captured here costs no other table.
            "captured_by_size": by_size(sizes, captured=True) if on_gpu() else None,
        }


def _medians(steps: Mapping[str, Step], sizes: Sizes) -> dict[str, float]:
    return medians_ms(steps, sizes["rounds"], sizes["steps"], warm_up=3)


def random(*shape: int) -> Tensor:
    """Entries so small that sums of many steps stay finite."""
    return torch.randn(*shape, device=streams.device()).mul_(0.01).to(dtype())


# -- collectives by size


def calls(num_bytes: int) -> dict[str, Step]:
    """Each collective on a tensor of `num_bytes`, waited for on the current stream."""
    n = dist.get_world_size()
    part = random(num_bytes // dtype().itemsize // n).zero_()
    whole = part.repeat(n)
    reduce_scatter = partial(reduce_scatter_single, part, whole)
    all_gather = partial(all_gather_single, whole, part)
    return {
        "all_reduce": partial(dist.all_reduce, whole),
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "reduce_scatter, all_gather": lambda: [reduce_scatter(), all_gather()],
    }


def by_size(sizes: Sizes, *, captured: bool = False) -> dict[str, Any]:
    """operation -> bytes -> ms.

    Args:
        captured: without launches: `CALLS` of each in one CUDA graph.
    """
    found: dict[str, Any] = {}
    for size in (1024 * kib for kib in sizes["kib"]):
        steps: dict[str, Any] = {}
        for name, call in calls(size).items():
            try:
                steps[name] = _captured(call) if captured else call
            except Exception as error:
                found["refused"] = f"{name}: {type(error).__name__}: {error}"
                return found
        for name, ms in _medians(steps, sizes).items():
            each = round(ms / CALLS, 6) if captured else ms
            found.setdefault(name, {})[str(size)] = each
        if captured:
            for graph in steps.values():
                graph.release()
    return found


def _captured(call: Step) -> Any:
    def many() -> None:
        for _ in range(CALLS):
            call()

    graph = capture_step(many)
    for _ in range(8):  # its warm-up, then the capture
        graph()
    return graph


# -- the ways to wait


def ways(sizes: Sizes) -> dict[str, float]:
    """The layer of section 3, once for each way to wait, and without the message."""
    layer, other = layer_of_size(random, sizes["layer"]), streams.Stream()
    names = (
        *("no message", "async_op=False", "wait at once", "wait late"),
        *("wait at once, on another stream", "CPU waits at once", "CPU waits late"),
    )
    rows, _, middle, _ = sizes["layer"]
    alone: Step = partial(dist.all_reduce, random(rows, middle))
    steps: dict[str, Step] = {n: partial(_layer, *layer, n, other) for n in names}
    return _medians(steps | {"the message alone": alone}, sizes)


def _layer(x: Tensor, w: Mapping[str, Tensor], way: str, other: Any) -> Tensor:
    part, current = x @ w["in"], streams.current_stream()
    work: Any = None
    if way != "no message":
        work = dist.all_reduce(part, async_op=(way != "async_op=False"))
    while way == "CPU waits at once" and not work.is_completed():
        pass
    if way in ("wait at once", "CPU waits at once"):
        work.wait()
    if elsewhere := way == "wait at once, on another stream":
        with streams.stream(other):
            work.wait()
            y = part @ w["out"]
    side = (x @ w["side_in"]).relu() @ w["side_out"]
    while way == "CPU waits late" and not work.is_completed():
        pass
    if way in ("wait late", "CPU waits late"):
        work.wait()
    if elsewhere:
        current.wait_stream(other)
        if y.is_cuda:
            y.record_stream(current)  # made on the other stream's memory
    else:
        y = part @ w["out"]
    return y + side


# -- windows


def windows(sizes: Sizes) -> dict[str, Any]:
    """Exercise 4.4: steps, and the most memory that each variant adds."""
    n, m = sizes["grads"]
    layers = [(random(n, tokens), random(tokens, m)) for tokens in sizes["tokens"]]
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
        "windows": _medians(steps, sizes),
        "window_peak_bytes": {name: _peak_bytes(step) for name, step in steps.items()},
    }


def _peak_bytes(step: Step) -> int | None:
    if not on_gpu():
        return None
    streams.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    streams.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


# -- small tensors


def small(sizes: Sizes) -> dict[str, float]:
    """Many small all-reduces: one by one, in one flat tensor, in one group call."""
    number, size = sizes["small"]
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
    return _medians(steps, sizes)
