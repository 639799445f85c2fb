"""Steps that each need a batch from the host, fed in every way of `feeding`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from overlaplab import streams
from overlaplab.bench.double_buffer.feeding import PEERS, WAYS, Compute, Loaders, pin
from overlaplab.bench.double_buffer.plan import Plan
from overlaplab.bench.timing import (
    Samples,
    agree,
    exposed_rows,
    run_block,
    slowest,
    time_until,
)
from overlaplab.bench.workload import release_memory

ALONE = "compute"  # steps whose batch is there already
_COPIES = 5  # that are timed alone


def cases(mib: float, plan: Plan, until: float) -> Iterator[dict[str, Any]]:
    """Batches of one size before steps of several lengths. Collective."""
    loaders = Loaders(round(mib * 2**20), dist.get_world_size())
    alone = _copy_alone(loaders)
    factors = {
        max(plan.least_ms * 1e6, factor * alone["copy_ms"] * 1e6)
        for factor in plan.lengths
    }
    for number, length_ns in enumerate(sorted(factors)):
        end = time.time() + (until - time.time()) / (len(factors) - number)
        case = _Case(loaders, length_ns, plan).run(end)
        yield {"batch_mib": mib, **alone, **case}
        release_memory()


def _copy_alone(loaders: Loaders) -> dict[str, float]:
    """Milliseconds of a copy to the device, and of filling pinned memory."""
    pinned, pageable = pin(loaders.batches[0]), loaders.batches[0]
    device = pinned.to(streams.device())
    copy_ns = _time(lambda: device.copy_(pinned, non_blocking=True))
    begin = time.perf_counter_ns()
    for _ in range(_COPIES):
        pinned.copy_(pageable)
    fill_ns = slowest([(time.perf_counter_ns() - begin) // _COPIES]).median_ns
    return {"copy_ms": round(copy_ns / 1e6, 4), "fill_ms": round(fill_ns / 1e6, 4)}


def _time(step: Callable[[], object]) -> float:
    """Nanoseconds, the same on all ranks."""
    return float(slowest(run_block(step, _COPIES)).median_ns)


class _Case:
    """One size of batches and one length of steps."""

    def __init__(self, loaders: Loaders, length_ns: float, plan: Plan) -> None:
        self._plan = plan
        self._compute = Compute(length_ns, plan.matmul_width)
        self._compute.calibrate(_time)
        self._loaders = loaders
        self._feeds: dict[str, Iterator[Any]] = {}
        self._not_measured: dict[str, str] = {}

    def run(self, until: float) -> dict[str, Any]:
        here = self._loaders.batches[0].to(streams.device())
        steps: dict[str, Callable[[], object]] = {ALONE: lambda: self._compute(here)}
        ours = [f"ours, {loader}" for loader in self._plan.loaders]
        chosen = {way for each in ours for way in (each, *PEERS.get(each, ()))}
        for way in WAYS:
            if way in chosen and (step := self._build(way)) is not None:
                steps[way] = step
        settling = {way: self._settling(step) for way, step in steps.items()}
        times, rounds = time_until(
            until,
            steps,
            num_rounds=self._plan.rounds,
            steps_a_round=self._plan.steps_a_round,
            settling=settling,
        )
        self._feeds.clear()  # ends workers, and lets pinned memory go
        return {
            "rounds": rounds,
            "matmuls": self._compute.repeats,
            **compared(times),
            "not_measured": self._not_measured,
        }

    def _settling(self, step: Callable[[], object]) -> int:
        """Steps until what worked ahead is used up, and the clock is what it stays."""
        enough = math.ceil(self._plan.settling_ms * 1e6 / _time(step))
        return max(self._plan.settling, enough)

    def _build(self, way: str) -> Callable[[], object] | None:
        """A way that feeds right batches on every rank, or None, with the reason."""

        def step() -> None:
            self._compute(next(self._feeds[way]))

        why = ""
        try:
            self._feeds[way] = WAYS[way](self._loaders)
            for _ in range(self._plan.warmup):
                _check(next(self._feeds[way]))
                step()
        except (RuntimeError, OSError, AssertionError) as error:
            why = f"{type(error).__name__}: {error}"
        if agree(bool(why)):
            self._feeds.pop(way, None)
            self._not_measured[way] = why or "it failed on another rank"
            return None
        return step


def _check(batch: Any) -> None:
    """Right first: a whole batch of the loader's, on the device."""
    low, high = float(batch.min()), float(batch.max())
    if batch.device != streams.device() or low != high or low not in (1.0, 2.0):
        raise AssertionError(
            f"a batch on {batch.device} has values from {low} to {high}; expected all "
            f"1 or all 2 on {streams.device()}"
        )


def compared(times: dict[str, Samples]) -> dict[str, Any]:
    """Each way beside the steps that compute only, and beside the best peer."""
    medians = {way: its.median_ns for way, its in times.items()}
    found: dict[str, Any] = {"variants": exposed_rows(times, ALONE)}
    peers = [way for way in medians if way != ALONE and way not in PEERS]
    if peers:
        found["best_peer"] = best = min(peers, key=lambda way: medians[way])
        found["ratio_to_best_peer"] = {
            way: round(ns / medians[best], 4) for way, ns in medians.items()
        }
    found["ratio_to_same_loader"] = {
        way: round(medians[way] / min(medians[peer] for peer in beside), 4)
        for way, those in PEERS.items()
        if way in medians and (beside := [peer for peer in those if peer in medians])
    }
    return found


def table(case: dict[str, Any]) -> str:
    """What people read while it runs."""
    lines = [
        f"\nbatches of {case['batch_mib']:g} MiB: a copy takes {case['copy_ms']:.3f} "
        f"ms, to fill pinned memory {case['fill_ms']:.3f} ms; {case['rounds']} rounds"
    ]
    for way, row in case["variants"].items():
        ratio = case.get("ratio_to_best_peer", {}).get(way, math.nan)
        line = (
            f"  {way:<30}{row['median_ms']:9.3f} ms  exposed {row['exposed_ms']:8.3f} "
            f"ms, {row['exposed_percent']:6.2f} % of the step  {ratio:6.3f} of the "
            "best peer"
        )
        if (same := case["ratio_to_same_loader"].get(way)) is not None:
            line += f", {same:6.3f} of the best with its loader"
        lines.append(line)
    lines += [f"  {way}: {why}" for way, why in case["not_measured"].items()]
    return "\n".join(lines)
