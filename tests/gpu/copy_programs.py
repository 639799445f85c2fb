"""Copies between host and device that the GPU tests run. Importable by processes."""

from __future__ import annotations

import torch

from tests.gpu.stream_programs import LONG, NUM


def blocked_by_copies() -> dict[str, bool]:
    """For each way to copy behind a busy stream: was the CPU held until it was over?"""
    num = 64 * 1024 * 1024
    on_gpu = torch.ones(num, device="cuda", dtype=torch.uint8)
    pageable = torch.ones(num, dtype=torch.uint8)
    pinned = torch.ones(num, dtype=torch.uint8).pin_memory()
    ways = {
        "to device, pageable": lambda: on_gpu.copy_(pageable, non_blocking=True),
        "to device, pinned": lambda: on_gpu.copy_(pinned, non_blocking=True),
        "to host, pageable": lambda: pageable.copy_(on_gpu, non_blocking=True),
        "to host, pinned": lambda: pinned.copy_(on_gpu, non_blocking=True),
        "to host, pinned by to()": lambda: on_gpu.to("cpu", non_blocking=True),
        "cpu()": on_gpu.cpu,
    }
    found = {}
    for name, copy in ways.items():
        copy()
        torch.cuda.synchronize()
        over = torch.cuda.Event()
        torch.cuda._sleep(LONG)
        over.record()
        copy()
        found[name] = over.query()
        torch.cuda.synchronize()
    return found


def refilled_pinned_buffer(wait: bool) -> float:
    """C06: a pinned buffer is refilled while its copy is still to come. Right: 1."""
    pinned = torch.ones(NUM).pin_memory()
    event = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    there = torch.empty_like(pinned, device="cuda")
    there.copy_(pinned, non_blocking=True)
    event.record()
    if wait:
        event.synchronize()
    pinned.fill_(-1.0)
    torch.cuda.synchronize()
    return float(there[-1].item())


def copies_in_both_directions() -> dict[str, float]:
    """Milliseconds of a copy each way: alone, one after the other, at once."""
    num = 256 * 1024 * 1024
    here = torch.ones(num, dtype=torch.uint8).pin_memory()
    back = torch.ones(num, dtype=torch.uint8).pin_memory()
    one = torch.ones(num, device="cuda", dtype=torch.uint8)
    other = torch.ones(num, device="cuda", dtype=torch.uint8)
    side = torch.cuda.Stream()

    def down() -> None:
        one.copy_(here, non_blocking=True)

    def up() -> None:
        back.copy_(other, non_blocking=True)

    def at_once() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            up()
        down()
        torch.cuda.current_stream().wait_stream(side)

    found = {}
    for name, copy in {"down": down, "up": up, "at once": at_once}.items():
        times = []
        for _ in range(5):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            copy()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        found[name] = min(times)
    return found
