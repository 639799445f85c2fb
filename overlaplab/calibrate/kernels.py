"""Matmul rates by dtype and size, copies on the device and to and from the host."""

from __future__ import annotations

from typing import Any

import torch

from overlaplab import streams
from overlaplab.calibrate.clock import device_ns, host_ns, on_cuda
from overlaplab.calibrate.plan import CalibrationPlan

Row = dict[str, Any]


def measure_matmuls(plan: CalibrationPlan) -> list[Row]:
    """Products of square matrices: {"dtype", "size", "flops", "ns"}."""
    rows = []
    for name in plan.matmul_dtypes:
        dtype = getattr(torch, name)
        for size in plan.matmul_sizes:
            a, b = (_random((size, size), dtype) for _ in range(2))
            out = torch.empty_like(a)
            ns = device_ns(
                lambda a=a, b=b, out=out: torch.mm(a, b, out=out),  # type: ignore[misc]
                10,
                repeats=plan.repeats,
            )
            rows.append({"dtype": name, "size": size, "flops": 2 * size**3, "ns": ns})
    return rows


def measure_memory(plan: CalibrationPlan) -> list[Row]:
    """Copies in device memory: {"bytes" read and written, "ns"}."""
    rows = []
    for size in plan.memory_bytes:
        source = _random((size // 2,), torch.bfloat16)
        target = torch.empty_like(source)
        ns = device_ns(
            lambda s=source, t=target: t.copy_(s),  # type: ignore[misc]
            10,
            repeats=plan.repeats,
        )
        rows.append({"bytes": 2 * size, "ns": ns})
    return rows


def measure_small_kernel(plan: CalibrationPlan) -> Row:
    """The shortest kernel there is, and what the CPU needs to launch it."""
    tensor = torch.ones(1, device=streams.device())
    return {
        "device_ns": device_ns(lambda: tensor.add_(1), 100, repeats=plan.repeats),
        "launch_ns": host_ns(lambda: tensor.add_(1), 100, repeats=plan.repeats),
    }


def measure_host_copies(plan: CalibrationPlan) -> list[Row]:
    """Copies to and from the host: {"direction", "pinned", "bytes", "ns"}; CUDA."""
    if not on_cuda():
        return []
    rows = []
    for size in plan.memory_bytes[:-1]:
        on_device = torch.empty(size, dtype=torch.uint8, device=streams.device())
        for pinned in (True, False):
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            for direction, to, of in (
                ("h2d", on_device, host),
                ("d2h", host, on_device),
            ):
                ns = device_ns(
                    lambda to=to, of=of: to.copy_(of, non_blocking=True),  # type: ignore[misc]
                    2,
                    repeats=3,
                )
                rows.append(
                    {"direction": direction, "pinned": pinned, "bytes": size, "ns": ns}
                )
    return rows


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random, not zeros: the power that a product draws depends on its bits."""
    return torch.randn(shape, device=streams.device()).to(dtype)
