"""One device: matmul rates by dtype and size, copies, operators of models.

Rows are JSON values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.calibrate.clock import device_ns, on_cuda
from overlaplab.calibrate.operators import measure_operators
from overlaplab.calibrate.plan import CalibrationPlan

Row = dict[str, Any]


def measure_device(
    plan: CalibrationPlan, report: Callable[[str], None]
) -> dict[str, Any]:
    """What does not need a link. Collective where there is a process group.

    Returns:
        "matmuls", "memory", "allocator", "small_kernel", "host_copies" and "models":
        those of the rank with the slowest device, for which the others wait.
    """
    found: dict[str, Any] = {}
    stages = (
        ("matrix products", "matmuls", _measure_matmuls),
        ("memory", "memory", _measure_memory),
        ("copies to and from the host", "host_copies", _measure_host_copies),
    )
    for stage, key, measure in stages:
        report(stage)
        found[key] = measure(plan)
    found["allocator"] = _measure_allocator()
    addition = partial(torch.ones(1, device=streams.device()).add_, 1)
    shortest = device_ns(addition, 100, repeats=plan.repeats)  # of all kernels
    found["small_kernel"] = {"device_ns": shortest}
    found["models"] = []
    for number, case in enumerate(plan.models, 1):
        report(f"operators of model {number} of {len(plan.models)}")
        found["models"].append(measure_operators(plan, case))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    steps = [[model["step_ns"] for model in answer["models"]] for answer in answers]
    slowest = max(range(len(steps)), key=lambda rank: sum(steps[rank]))
    return {**answers[slowest], "rank": slowest, "step_ns_by_rank": steps}


def _measure_matmuls(plan: CalibrationPlan) -> list[Row]:
    """Products of square matrices: {"dtype", "size", "flops", "ns"}."""
    rows = []
    for name in plan.matmul_dtypes:
        for size in plan.matmul_sizes:
            a, b = (_random((size, size), getattr(torch, name)) for _ in range(2))
            call = partial(torch.mm, a, b, out=torch.empty_like(a))
            ns = device_ns(call, 10, repeats=plan.repeats)
            rows.append({"dtype": name, "size": size, "flops": 2 * size**3, "ns": ns})
    return rows


def _measure_memory(plan: CalibrationPlan) -> list[Row]:
    """Copies in device memory: {"bytes" read and written, "ns"}."""
    rows = []
    for size in plan.memory_bytes:
        source = _random((size // 2,), torch.bfloat16)
        call = partial(torch.empty_like(source).copy_, source)
        ns = device_ns(call, 10, repeats=plan.repeats)
        rows.append({"bytes": 2 * size, "ns": ns})
    return rows


def _measure_allocator() -> dict[str, int]:
    """Bytes that one byte takes, and that a stream's first matmul keeps; CUDA."""
    if not on_cuda():
        return {}
    before = torch.cuda.memory_allocated()
    kept = [torch.empty(1, dtype=torch.uint8, device=streams.device())]
    block = torch.cuda.memory_allocated() - before
    matrix = torch.ones(64, 64, device=streams.device())
    kept.append(torch.empty_like(matrix))
    before = torch.cuda.memory_allocated()
    with streams.stream(streams.Stream()):
        torch.mm(matrix, matrix, out=kept[1])
    streams.synchronize()
    workspace = torch.cuda.memory_allocated() - before
    return {"allocation_bytes": block, "workspace_bytes": workspace}


def _measure_host_copies(plan: CalibrationPlan) -> list[Row]:
    """Copies to and from the host: {"direction", "pinned", "bytes", "ns"}; CUDA."""
    rows: list[Row] = []
    for size in plan.memory_bytes[:-1] if on_cuda() else ():
        device = torch.empty(size, dtype=torch.uint8, device=streams.device())
        for pinned in (True, False):
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            for way, to, of in (("h2d", device, host), ("d2h", host, device)):
                ns = device_ns(partial(to.copy_, of, non_blocking=True), 2, repeats=3)
                rows.append(
                    {"direction": way, "pinned": pinned, "bytes": size, "ns": ns}
                )
    return rows


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random, not zeros: the power that a product draws depends on its bits."""
    return torch.randn(shape, device=streams.device()).to(dtype)
