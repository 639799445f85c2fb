"""What lab 00 shows of real GPUs: a launch is not a start.

Times are the CPU's clock around code that launches: when it returned, and when the GPU
had finished (`synchronize`). Each is the median of several runs after a warm-up, on
this rank; all ranks run the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab_course.lab00 import reference

NUM_PRODUCTS = 50
NUM_LAYERS = 12
NUM_BATCHES = 20
ROUNDS = 15


def measure() -> dict[str, Any]:
    """Every table of the lesson's section on GPUs, in ms. Collective."""
    on_gpu = torch.cuda.is_available() and dist.get_backend() == "nccl"
    device = streams.device() if on_gpu else torch.device("cpu")
    width, wide, rounds = (2048, 4096, ROUNDS) if on_gpu else (64, 96, 3)
    batches = (16, 64, 256, 1024, 4096, 16384) if on_gpu else (4, 16, 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = {"layers": NUM_LAYERS, "width": width, "dtype": str(dtype)[6:]}
    with torch.no_grad():
        products = [
            {"width": w, "number": NUM_PRODUCTS, **_products(w, device, dtype, rounds)}
            for w in (width // 8, wide)
        ]
    model = _model(width, device, dtype)
    steps = [{"batch": b, **_backward(model, b, width, rounds)} for b in batches]
    loops = [
        {"batch": b, **_loops(model, b, width, max(3, rounds // 3))}
        for b in batches[len(batches) // 2 :]
    ]
    return {
        "products": products,
        "steps": {**shape, "rows": steps},
        "loops": {**shape, "batches": NUM_BATCHES, "rows": loops},
        "two ranks": _two_ranks(2 * wide, device, dtype, rounds),
    }


def _model(width: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    torch.manual_seed(0)
    return nn.Sequential(*layers).to(device, dtype)


def _timed(launch: Callable[[], Any], rounds: int) -> dict[str, float]:
    """When `launch()` returned and when the GPU had finished, ms after its call."""
    returned, finished = [], []
    for _ in range(3):
        launch()
    for _ in range(rounds):
        streams.synchronize()
        dist.barrier()
        streams.synchronize()
        begin = time.perf_counter()
        launch()
        returned.append(time.perf_counter() - begin)
        streams.synchronize()
        finished.append(time.perf_counter() - begin)
    return {
        "returned_ms": round(1e3 * statistics.median(returned), 4),
        "finished_ms": round(1e3 * statistics.median(finished), 4),
    }


def _products(
    width: int, device: torch.device, dtype: torch.dtype, rounds: int
) -> dict[str, float]:
    """A queue of equal products, each into the same memory."""
    a = torch.randn(width, width, device=device, dtype=dtype) / width**0.5
    out = torch.empty_like(a)

    def launch() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(a, a, out=out)

    return _timed(launch, rounds)


def _backward(
    model: nn.Module, batch: int, width: int, rounds: int
) -> dict[str, float]:
    """Forward and backward pass: when `backward()` returned, and when it was done."""
    first = next(model.parameters())
    x = torch.randn(batch, width, device=first.device, dtype=first.dtype)

    def launch() -> None:
        for param in model.parameters():
            param.grad = None
        model(x).square().mean().backward()

    return _timed(launch, rounds)


def _loops(model: nn.Module, batch: int, width: int, rounds: int) -> dict[str, float]:
    """The two training loops of exercise 0.3, ms a step."""
    first = next(model.parameters())
    rows = [
        torch.randn(batch, width, device=first.device, dtype=first.dtype)
        for _ in range(2)
    ]
    batches = [rows[i % 2] for i in range(NUM_BATCHES)]
    times = {}
    for name, loop in (
        ("item", reference.broken_train),
        ("at the end", reference.good_train),
    ):
        timed = _timed(lambda loop=loop: loop(model, batches), rounds)  # type: ignore[misc]
        times[f"{name}_ms"] = round(timed["finished_ms"] / NUM_BATCHES, 4)
    return times


def _two_ranks(
    width: int, device: torch.device, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    """Exercise 0.4: beside one another, the product first, and both alone."""
    x = torch.ones(width, width, device=device, dtype=dtype)
    a = torch.randn(width, width, device=device, dtype=dtype) / width**0.5

    def one_after_the_other(x: Tensor, a: Tensor) -> Tensor:
        product = a @ a
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        return product + x

    def finished(launch: Callable[[], Any]) -> float:
        x.fill_(1.0)
        return _timed(launch, rounds)["finished_ms"]

    return {
        "width": width,
        "bytes": x.numel() * x.element_size(),
        "ranks": dist.get_world_size(),
        "product_ms": finished(lambda: a @ a),
        "message_ms": finished(lambda: dist.all_reduce(x)),
        "product first_ms": finished(lambda: one_after_the_other(x, a)),
        "message first_ms": finished(lambda: reference.step(x, a)),
    }
