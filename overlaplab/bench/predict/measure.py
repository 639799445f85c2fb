"""The half that needs GPUs: calibrate, then time every configuration of the grid.

The calibration comes first and from other programs, see `calibrate.plan`; launches are
timed before and after the steps that they bound, since a host is not equally fast all
the time. After each case the file is written, and a kill loses nothing. Each link has
processes of its own: NCCL reads `NCCL_P2P_DISABLE` when it starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.bench import variants
from overlaplab.bench.profiled import of_last_to_come, profile_in_turn
from overlaplab.bench.timing import agree, time_in_turn
from overlaplab.bench.variants import Variant
from overlaplab.bench.workload import (
    LINKS,
    MODELS,
    build,
    plans,
    release_memory,
    say,
    write_from_rank_0,
)
from overlaplab.calibrate.contention import measure_between
from overlaplab.calibrate.device import measure_device
from overlaplab.calibrate.launch import measure_launches
from overlaplab.calibrate.plan import CalibrationPlan

PROFILED_STEPS = 2
LEAST_ROUNDS = 2
AHEAD_NS = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The configurations of the comparison."""

    # sizes for each model of `data_parallel.MODELS`
    batches: Mapping[str, tuple[int, ...]]
    # the same, of steps that wait for the CPU; they are reported apart
    launch_bound: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buckets_mib: tuple[float, ...] = (12, 50, 200, 800)  # caps of the bucketed reducer
    tokens: int = 1024  # sequence length
    links: tuple[str, ...] = tuple(LINKS)  # of `LINKS`
    # most blocks of each variant; the time that is left may allow fewer
    rounds: int = 5
    steps_a_round: int = 3  # counted steps of a block
    warmup: int = 3  # steps before a variant is timed

    def cases(self) -> list[tuple[str, int, bool]]:
        """(model, batch, whether it is bound by launches); those come first."""
        return [
            (name, batch, apart)
            for sizes, apart in ((self.launch_bound, True), (self.batches, False))
            for name, several in sizes.items()
            for batch in several
        ]


GPU, REHEARSAL = plans("predict", Grid).values()


def measure_on_link(
    heading: dict[str, Any],
    link: str,
    grid: Grid,
    plan: CalibrationPlan,
    out: Path,
    until: float,
) -> None:
    """Everything of one link, on this rank of its own process group. Collective.

    Args:
        heading: what the file begins with; results of earlier links are kept.
        link: of `LINKS`.
        grid, plan: what to measure.
        out: the file, written by rank 0.
        until: seconds of `time.time()`: after that no case is begun.
    """
    results = json.loads(out.read_text()) if out.exists() else dict(heading)
    found: dict[str, Any] = {"cases": [], "skipped": []}
    results.setdefault("links", {})[link] = found

    def progress(what: str) -> None:
        say(f"{link}: {what} ({until - time.time():.0f} s left)")

    calibration = found["calibration"] = measure_between(plan, progress)
    if "device" not in results:
        results["device"] = measure_device(plan, progress)
    calibration["launches"] = measure_launches(plan, progress)
    release_memory()
    write_from_rank_0(results, out)
    cases = grid.cases()
    weights = [_weight(name, batch) for name, batch, _ in cases]
    slowness = 0.0  # least seconds for a weight of one, of the slowest case so far
    for number, (name, batch, apart) in enumerate(cases):
        begin = time.time()
        share = (until - begin) * weights[number] / sum(weights[number:])
        if agree(until - begin < slowness * weights[number]):
            found["skipped"].append([name, batch])
            continue
        if not apart and "launches_after" not in calibration:
            calibration["launches_after"] = measure_launches(plan, progress)
        progress(f"{name}, batch {batch}")
        case = _measure_case(name, batch, grid, share, 0 if apart else AHEAD_NS)
        spare_s = (case["rounds"] - LEAST_ROUNDS) * case["round_s"]
        slowness = max(slowness, (time.time() - begin - spare_s) / weights[number])
        found["cases"].append({"launch_bound": apart, **case})
        write_from_rank_0(results, out)


def _weight(name: str, batch: int) -> float:
    """About how long a case takes: building and profiling, and its steps."""
    config = MODELS[name]
    matrices = 12 * config.num_layers * config.d_model + 2 * config.vocab_size
    return 3.5 + batch * config.d_model * matrices / 1e9


def _measure_case(
    name: str, batch: int, grid: Grid, share_s: float, ahead_ns: int
) -> dict[str, Any]:
    """All variants of one model and batch size. Collective."""
    begin = time.time()
    model, inputs, head = build(name, batch, grid.tokens)
    built = _build(model, inputs, grid)
    steps = {kind: variant.step for kind, variant in built.items()}
    for _ in range(grid.warmup):
        streams.synchronize()
        warm = time.time()
        for step in steps.values():
            step()
        streams.synchronize()
    once_s = time.time() - warm
    left_s = share_s - (time.time() - begin) - 2 - (PROFILED_STEPS + 2) * once_s
    round_s = once_s * (grid.steps_a_round + 1)
    rounds = max(LEAST_ROUNDS, min(grid.rounds, int(left_s / round_s)))
    both = torch.tensor([rounds], device=streams.device())
    dist.all_reduce(both, dist.ReduceOp.MIN)
    stolen = _stolen_ticks()
    times = time_in_turn(
        steps, num_rounds=int(both.item()), steps_a_round=grid.steps_a_round
    )
    state = _device_state(steps["serial"])
    kernels = of_last_to_come(
        profile_in_turn(steps, num_steps=PROFILED_STEPS, ahead_ns=ahead_ns)
    )
    result = {
        **head,
        "rounds": int(both.item()),
        "round_s": round(round_s, 3),
        "stolen_ticks": _stolen_ticks() - stolen,
        **state,
        "variants": {kind: samples.to_json() for kind, samples in times.items()},
    }
    for kind, sums in kernels.items():
        result["variants"][kind]["kernels"] = sums
    for variant in built.values():
        variant.close()
    del built, steps, model, inputs
    release_memory()
    if streams.device().type == "cuda":
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        torch.cuda.reset_peak_memory_stats()
    return result


def _build(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], grid: Grid
) -> dict[str, Variant]:
    built = {
        "serial": variants.serial(model, inputs),
        "per parameter": variants.hooks(model, inputs),
    }
    for cap in grid.buckets_mib:
        built[f"bucketed {cap:g}"] = variants.bucketed(model, inputs, cap)
    return built


def _stolen_ticks() -> int:
    """CPU time that the host gave to others, in ticks; 0 where nobody says."""
    try:
        return int(Path("/proc/stat").read_text().split("\n")[0].split()[8])
    except (OSError, IndexError, ValueError):
        return 0


def _device_state(step: Any) -> dict[str, Any]:
    """Clock, power and temperature in the middle of a step, where NVML says it."""
    if streams.device().type != "cuda":
        return {}
    for _ in range(3):
        step()
    found: dict[str, Any] = {}
    for key, read in (
        ("sm_clock_mhz", torch.cuda.clock_rate),
        ("power_mw", torch.cuda.power_draw),
        ("temperature_c", torch.cuda.temperature),
    ):
        try:
            found[key] = int(read())
        except Exception:  # NVML or its Python package is not there
            found[key] = None
    streams.synchronize()
    return found


def describe(grid: Grid, plan: CalibrationPlan) -> dict[str, Any]:
    """The settings, as the file keeps them."""
    return {"grid": asdict(grid), "plan": asdict(plan)}
