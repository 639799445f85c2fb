"""What lab 00 shows of real GPUs: a launch is not a start.

Times are the CPU's clock around code that launches: when it returned, and when the GPU
had finished (`synchronize`). Each is the median of several runs after a warm-up, on
this rank; all ranks run the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab_course.lab00 import reference
from overlaplab_course.lab00.given import linear_layers, train_step
from overlaplab_course.timing import get_ready

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
    matrix = partial(torch.randn, device=device, dtype=dtype)
    products = [_products(matrix(w, w) / w**0.5, rounds) for w in (width // 8, wide)]
    torch.manual_seed(0)
    model = nn.Sequential(*linear_layers(NUM_LAYERS, width)).to(device, dtype)
    steps = [_backward(model, matrix(b, width), rounds) for b in batches]
    loops = []
    for b in (1024, 4096, 8192, 16384) if on_gpu else (4, 16):
        rows = [matrix(b, width) for _ in range(2)]
        loops.append(_loops(model, rows * (NUM_BATCHES // 2), rounds))
    shape = {"layers": NUM_LAYERS, "width": width, "dtype": str(dtype)[6:]}
    return {
        "products": products,
        "steps": {**shape, "rows": steps},
        "loops": {**shape, "batches": NUM_BATCHES, "rows": loops},
        "two ranks": _two_ranks(matrix(2 * wide, 2 * wide), rounds),
    }


def _timed(launch: Callable[[], Any], rounds: int) -> dict[str, float]:
    """When `launch()` returned and when the GPU had finished, ms after its call."""
    returned, finished = [], []
    for _ in range(3):
        launch()
    for _ in range(rounds):
        get_ready()
        begin = time.perf_counter()
        launch()
        returned.append(time.perf_counter() - begin)
        streams.synchronize()
        finished.append(time.perf_counter() - begin)
    return {
        "returned_ms": round(1e3 * statistics.median(returned), 4),
        "finished_ms": round(1e3 * statistics.median(finished), 4),
    }


def _products(a: Tensor, rounds: int) -> dict[str, float]:
    """A queue of equal products, each into the same memory."""
    out = torch.empty_like(a)

    def launch() -> None:
        with torch.no_grad():
            for _ in range(NUM_PRODUCTS):
                torch.mm(a, a, out=out)

    return {"width": len(a), "number": NUM_PRODUCTS, **_timed(launch, rounds)}


def _backward(model: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    """Forward and backward pass: when `backward()` returned, and when it was done."""

    def launch() -> None:
        model.zero_grad()
        train_step(model, x)

    return {"batch": len(x), **_timed(launch, rounds)}


def _loops(model: nn.Module, batches: list[Tensor], rounds: int) -> dict[str, float]:
    """The two training loops of exercise 0.3, taken in turn, ms per step."""
    loops = {
        "item": partial(reference.given_loop, model, batches),
        "at the end": partial(reference.train, model, batches),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(rounds + 1):
        for name, loop in loops.items():
            get_ready()
            begin = time.perf_counter()
            loop()
            streams.synchronize()
            if round_:  # the first is warm-up
                times[name].append(time.perf_counter() - begin)
    return {"batch": len(batches[0])} | {
        f"{name}_ms": round(1e3 * statistics.median(all_s) / NUM_BATCHES, 4)
        for name, all_s in times.items()
    }


def _two_ranks(x: Tensor, rounds: int) -> dict[str, Any]:
    """Exercise 0.4: beside one another, the product first, and both alone."""
    a: Tensor = x / len(x) ** 0.5

    def one_after_the_other() -> Tensor:
        product = a @ a
        dist.all_reduce(x)
        return product + x

    def finished(launch: Callable[[], Any]) -> float:
        x.fill_(1.0)
        return _timed(launch, rounds)["finished_ms"]

    return {
        "width": len(x),
        "bytes": x.numel() * x.element_size(),
        "ranks": dist.get_world_size(),
        "product_ms": finished(lambda: a @ a),
        "message_ms": finished(lambda: dist.all_reduce(x)),
        "product first_ms": finished(one_after_the_other),
        "message first_ms": finished(lambda: reference.step(x, a)),
    }
