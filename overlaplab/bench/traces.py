"""Profiler traces of data-parallel steps, ours and PyTorch's own, from one run.

For each variant: the step timed without a profiler, all variants in turn; then a trace
of three steps from every rank. What `overlaplab report` says of them can be checked:
which variant is which is in the file's name. For some, what each mode of `ol.profile`
costs, and how much exposed communication it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from overlaplab import streams
from overlaplab.bench import variants
from overlaplab.bench.timing import run_block, slowest, time_in_turn
from overlaplab.bench.variants import Variant
from overlaplab.bench.workload import build, release_memory, say
from overlaplab.profiling.profile import Profile, profile

ONE_BUCKET_MIB = 1 << 20
DDP_100: dict[str, Any] = {"bucket_cap_mb": 100, "views": True, "static_graph": True}
WARMUP_STEPS = 12  # DDP has found its buckets by then
PROFILER_WARMUP = 2
PROFILED_STEPS = 3
NUM_ROUNDS = 6
STEPS_A_ROUND = 5
MODES = ("plain", "events", "kineto")
MODE_ROUNDS = 3
MODE_STEPS = 5
COMPARED = ("compute", "serial", "ddp-default", "ours-25", "ours-100")


def measure_case(
    name: str, batch_size: int, tokens: int, folder: Path
) -> dict[str, Any]:
    """Time and trace every variant of one model and batch size. Collective.

    Args:
        folder: gets VARIANT/rank_R.json.gz from every rank.

    Returns:
        The head of the case and the unprofiled times; rank 0's result counts.
    """
    model, batch, head = build(name, batch_size, tokens)
    case = model, batch
    built: dict[str, Variant] = {
        "compute": variants.compute(*case),
        "serial": variants.serial(*case),
        "per-parameter": variants.hooks(*case),
        "ddp-default": variants.ddp(*case),
        "ddp-100": variants.ddp(*case, **DDP_100),
        "ours-25": variants.bucketed(*case, 25),
        "ours-100": variants.bucketed(*case, 100),
        "ours-one-bucket": variants.bucketed(*case, ONE_BUCKET_MIB),
    }
    steps: Mapping[str, Callable[[], object]] = {k: v.step for k, v in built.items()}
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    times = time_in_turn(steps, num_rounds=NUM_ROUNDS, steps_a_round=STEPS_A_ROUND)
    for variant, step in steps.items():
        say(f"  {variant:<18}{times[variant].median_ns / 1e6:9.3f} ms")
        trace_steps(step, folder / variant / f"rank_{dist.get_rank()}.json.gz")
    modes = {v: compare_modes(step) for v, step in steps.items() if v in COMPARED}
    for variant, found in modes.items():
        ratios = (f"{mode} {f['step_ratio']:.3f}" for mode, f in found.items())
        say(f"  {variant:<18}step against plain: {', '.join(ratios)}")
    for made in built.values():
        made.close()
    result = {
        **head,
        "variants": {k: t.to_json() for k, t in times.items()},
        "profile_modes": modes,
    }
    del built, steps, case, model
    release_memory()
    return result


def trace_steps(step: Callable[[], object], path: Path) -> None:
    """Write a trace of `PROFILED_STEPS` steps. Call on all ranks together."""
    streams.synchronize()
    dist.barrier()
    with profile(warmup=PROFILER_WARMUP, steps=PROFILED_STEPS) as profiled:
        for _ in range(PROFILER_WARMUP + PROFILED_STEPS):
            step()  # no synchronisation between steps: the CPU runs ahead, as always
            profiled.step()
    profiled.save(path)


def compare_modes(step: Callable[[], object]) -> dict[str, Any]:
    """What each way of profiling costs, and what it sees, of one variant. Collective.

    Blocks without a profile, with events and with torch.profiler take turns. Each step
    is timed in the same way, by events at its ends.

    Returns:
        For each mode the step (the slowest rank's, ms) and its ratio to the step
        without a profile; for the profiles each rank's exposed communication, mean of
        the steps of the last block, in ms and as a share of the profiled step; None
        where collectives were launched that the mode does not see.
    """
    times: dict[str, list[int]] = {mode: [] for mode in MODES}
    last: dict[str, Profile] = {}
    for _ in range(MODE_ROUNDS):
        for mode in MODES:
            streams.synchronize()
            dist.barrier()
            if mode == "plain":
                times[mode] += run_block(step, MODE_STEPS)
                continue
            with profile(warmup=1, events=mode == "events") as profiled:
                times[mode] += run_block(_with_step(step, profiled), MODE_STEPS)
            last[mode] = profiled
    samples = {mode: slowest(found) for mode, found in times.items()}
    plain_ns = samples["plain"].median_ns
    answer: dict[str, Any] = {}
    for mode, found in samples.items():
        answer[mode] = {
            "step_ms": round(found.median_ns / 1e6, 4),
            "step_ratio": round(found.median_ns / plain_ns, 4),
        }
        if mode in last:
            answer[mode] |= _exposed(last[mode])
    return answer


def _with_step(step: Callable[[], object], profiled: Profile) -> Callable[[], None]:
    def both() -> None:
        step()
        profiled.step()

    return both


def _warns(remark: str) -> bool:
    return "not seen by events" in remark or "The CPU was late" in remark


def _exposed(profiled: Profile) -> dict[str, Any]:
    timeline = profiled.timeline
    exposed_ns, step_ns = [], []
    for number in timeline.steps:
        of_step = timeline.of_step(number)
        device = of_step.where(lambda s: s.kind not in ("launch", "host"))
        exposed_ns.append(device.report().exposed_ns)
        step_ns.append(device.report().step_ns)
    if any("not seen by events" in remark for remark in timeline.source.remarks):
        mine: tuple[float | None, float | None] = (None, None)  # nothing is known
    else:
        mine = (
            round(sum(exposed_ns) / len(exposed_ns) / 1e6, 4),
            round(sum(exposed_ns) / sum(step_ns), 4),
        )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        "exposed_ms": [ms for ms, _ in everyone],
        "exposed_share": [share for _, share in everyone],
        "remarks": [r for r in timeline.source.remarks if _warns(r)],
    }
