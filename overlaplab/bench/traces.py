"""Profiler traces of data-parallel steps, ours and PyTorch's own, from one run.

For each variant: the step timed without a profiler, all variants in turn; then a trace
of three steps from every rank. What `overlaplab report` says of them can be checked:
which variant is which is in the file's name, and nowhere in the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from overlaplab import streams
from overlaplab.bench import variants
from overlaplab.bench.data_parallel import MODELS, random_batch, release_memory, say
from overlaplab.bench.timing import time_in_turn
from overlaplab.bench.variants import Variant
from overlaplab.models import Transformer

ONE_BUCKET_MIB = 1 << 20
WARMUP_STEPS = 12  # DDP has found its buckets by then
PROFILER_WARMUP = 2
PROFILED_STEPS = 3
NUM_ROUNDS = 6
STEPS_A_ROUND = 5


def measure_case(
    name: str, batch_size: int, tokens: int, folder: Path
) -> dict[str, Any]:
    """Time and trace every variant of one model and batch size. Collective.

    Args:
        folder: gets VARIANT/rank_R.json.gz from every rank.

    Returns:
        The head of the case and the unprofiled times; rank 0's result counts.
    """
    device = streams.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        torch.manual_seed(0)
        model = Transformer(MODELS[name]).to(dtype)
    batch = random_batch(MODELS[name], batch_size, tokens, device)
    makers: dict[str, Callable[[], Variant]] = {
        "compute": functools.partial(variants.compute, model, batch),
        "serial": functools.partial(variants.serial, model, batch),
        "per-parameter": functools.partial(variants.hooks, model, batch),
        "ddp-default": functools.partial(variants.ddp, model, batch),
        "ddp-100": functools.partial(
            variants.ddp,
            model,
            batch,
            bucket_cap_mb=100,
            views=True,
            static_graph=True,
        ),
        "ours-25": functools.partial(variants.bucketed, model, batch, 25),
        "ours-100": functools.partial(variants.bucketed, model, batch, 100),
        "ours-one-bucket": functools.partial(
            variants.bucketed, model, batch, ONE_BUCKET_MIB
        ),
    }
    built = {variant: make() for variant, make in makers.items()}
    steps: Mapping[str, Callable[[], object]] = {k: v.step for k, v in built.items()}
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    times = time_in_turn(steps, num_rounds=NUM_ROUNDS, steps_a_round=STEPS_A_ROUND)
    for variant, step in steps.items():
        say(f"  {variant:<18}{times[variant].median_ns / 1e6:9.3f} ms")
        trace_steps(step, folder / variant / f"rank_{dist.get_rank()}.json.gz")
    for made in built.values():
        made.close()
    result = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch_size,
        "tokens": tokens,
        "variants": {k: t.to_json() for k, t in times.items()},
    }
    del built, steps, model
    release_memory()
    return result


def trace_steps(step: Callable[[], object], path: Path) -> None:
    """Write a trace of `PROFILED_STEPS` steps. Call on all ranks together."""
    activities = [ProfilerActivity.CPU]
    if streams.device().type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = schedule(wait=0, warmup=PROFILER_WARMUP, active=PROFILED_STEPS, repeat=1)
    streams.synchronize()
    dist.barrier()
    with profile(
        activities=activities,
        schedule=plan,
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    ) as profiler:
        for number in range(1, PROFILER_WARMUP + PROFILED_STEPS + 1):
            step()  # no synchronisation between steps: the CPU runs ahead, as always
            if number == PROFILER_WARMUP + PROFILED_STEPS:
                streams.synchronize()
            profiler.step()
