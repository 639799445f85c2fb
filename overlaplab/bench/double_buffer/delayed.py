"""Data-parallel steps whose averages come one step late, beside those in time.

A step is forward, backward and `wait()`, without an optimizer. Each kind of reducer
first tries a few sizes of buckets, alone on the device: the peak of its memory is of
that run. The best of each kind then take turns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.bench import variants
from overlaplab.bench.double_buffer.plan import Plan
from overlaplab.bench.memory import peaks
from overlaplab.bench.timing import Samples, exposed_rows, time_in_turn, time_until
from overlaplab.bench.variants import Variant
from overlaplab.bench.workload import build, release_memory

ALONE, DDP, BUCKETED, DELAYED = "compute", "ddp", "bucketed", "delayed"
Maker = Callable[[], Variant]


def measure_case(size: int, plan: Plan, until: float) -> dict[str, Any]:
    """One batch size. Collective; rank 0's answer counts."""
    model, batch, head = build(plan.model, size, plan.tokens)
    result = head | _Case(model, batch, plan).run(until)
    release_memory()
    return result


class _Case:
    def __init__(self, model: nn.Module, batch: tuple[Tensor, ...], plan: Plan) -> None:
        self._model, self._batch, self._plan = model, batch, plan
        self._norm = variants.reference_norm(model, batch)

    def run(self, until: float) -> dict[str, Any]:
        swept = {
            kind: list(self._sweep(makers)) for kind, makers in self._makers().items()
        }
        best = {
            kind: min(found, key=lambda row: float(row["median_ms"]))
            for kind, found in swept.items()
        }
        built = {kind: self._build(row["make"]) for kind, row in best.items()}
        steps = {kind: variant.step for kind, variant in built.items()}
        times, rounds = time_until(
            until,
            steps,
            num_rounds=self._plan.rounds,
            steps_a_round=self._plan.steps_a_round,
            settling=dict.fromkeys(steps, 1),
        )
        for variant in built.values():
            variant.close()
        rows = {
            kind: {
                "name": variant.name,
                "settings": variant.settings,
                **best[kind]["peaks"],
            }
            for kind, variant in built.items()
        }
        return {
            "rounds": rounds,
            **compared(times, rows),
            "sweeps_median_ms": {
                kind: {row["name"]: row["median_ms"] for row in found}
                for kind, found in swept.items()
            },
            "gradient_norm": self._norm,
        }

    def _makers(self) -> dict[str, list[Maker]]:
        def each(make: Callable[..., Variant], *sizes: Any, **settings: Any) -> Any:
            make = functools.partial(make, self._model, self._batch, **settings)
            return [functools.partial(make, **size) for size in sizes]

        caps = self._plan.caps_mib
        ours = ({}, *({"mib": cap} for cap in caps))
        tuned = [
            {"bucket_cap_mb": cap, "views": True, "static_graph": True} for cap in caps
        ]
        return {
            ALONE: each(variants.compute, {}),
            DDP: each(variants.ddp, {}, *tuned),
            BUCKETED: each(variants.bucketed, *ours),
            DELAYED: each(variants.delayed, *ours),
        }

    def _sweep(self, makers: list[Maker]) -> Iterator[dict[str, Any]]:
        """Each alone, one after the other."""
        for make in makers:
            release_memory()
            if streams.device().type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            variant = self._build(make)
            samples = time_in_turn(
                {variant.name: variant.step},
                num_rounds=1,
                steps_a_round=self._plan.steps_a_round,
            )[variant.name]
            yield {
                "make": make,
                "name": variant.name,
                "median_ms": round(samples.median_ns / 1e6, 4),
                "peaks": peaks(),
            }
            variant.close()
            del variant

    def _build(self, make: Maker) -> Variant:
        """Built, warm and right: weights stay, so a late average is the same one."""
        variant = make()
        for _ in range(max(2, self._plan.warmup)):
            variant.step()
        if variant.averages:
            variants.check_gradients(variant, self._norm)
        return variant


def compared(
    times: dict[str, Samples], rows: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Each kind beside the steps that compute only, and beside its peers."""
    medians = {kind: its.median_ns for kind, its in times.items()}
    found: dict[str, Any] = {
        "variants": {
            kind: {**rows.get(kind, {}), **row}
            for kind, row in exposed_rows(times, ALONE).items()
        }
    }
    for peer in (BUCKETED, DDP):
        found[f"ratio_to_{peer}"] = {
            kind: round(ns / medians[peer], 4) for kind, ns in medians.items()
        }
    return found


def table(case: dict[str, Any]) -> str:
    """What people read while it runs."""
    lines = [
        f"\n{case['model']}, batch {case['batch']}, {case['link']}: "
        f"{case['rounds']} rounds"
    ]
    for kind, row in case["variants"].items():
        gib = row.get("peak_allocated_bytes", math.nan) / 2**30
        lines.append(
            f"  {row['name']:<28}{row['median_ms']:9.2f} ms  exposed "
            f"{row['exposed_ms']:8.2f} ms  {gib:6.2f} GiB  "
            f"{case['ratio_to_bucketed'][kind]:6.3f} of bucketed, "
            f"{case['ratio_to_ddp'][kind]:6.3f} of DDP"
        )
    return "\n".join(lines)
