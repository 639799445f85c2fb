"""Data-parallel steps, ours beside PyTorch's own, measured in one run.

For each model and batch: sweep the settings of DDP, of our reducer and of its captured
step; then time the best of each beside the baselines, in turn, and compare every
variant's gradients with a plain all-reduce before any time is believed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.bench import variants
from overlaplab.bench.kernels import kernel_sums
from overlaplab.bench.timing import Samples, time_in_turn
from overlaplab.bench.variants import Variant
from overlaplab.bench.workload import build, plans, release_memory, say
from overlaplab.errors import CaptureError
from overlaplab.profiling.profile import profile

CASES = dict.fromkeys(("gpt-738m", "gpt-162m", "gpt-1.4b"), (1, 2, 8))
PROFILED = ("compute", "ddp best", "ours best", "ddp captured", "ours captured")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    caps_mib: tuple[float, ...] = (25, 100, 200)  # sizes of DDP's buckets to try
    our_caps_mib: tuple[float, ...] = (25, 100, 400)  # of ours
    captured_caps_mib: tuple[float, ...] = (100, 400)  # of our captured step
    warmup: int = 5  # steps before a variant is timed
    sweep_rounds: int = 1  # blocks per variant in the sweeps
    final_rounds: int = 7  # and in the final comparison
    steps_a_round: int = 5  # steps per block
    tokens: int = 1024  # sequence length
    # whether serial, one message per parameter and captured computation are measured
    baselines: bool = True
    micro_batches: int = 4  # of the steps that accumulate


BRIEF, QUICK = plans("data_parallel", Plan).values()


Maker = Callable[[], Variant]
Swept = list[tuple[Maker, str, Samples]]


def measure_case(name: str, batch_size: int, plan: Plan) -> dict[str, Any]:
    """All variants of one model and batch size. Collective; rank 0's result counts."""
    return _measure(name, batch_size, plan, _Case.run)


def measure_accumulation(name: str, batch_size: int, plan: Plan) -> dict[str, Any]:
    """Steps of several micro-batches, of ours by default and of DDP. Collective."""
    return _measure(name, batch_size, plan, _Case.accumulate)


def _measure(
    name: str,
    batch_size: int,
    plan: Plan,
    measure: Callable[[_Case], dict[str, Any]],
) -> dict[str, Any]:
    model, batch, head = build(name, batch_size, plan.tokens)
    millions = head["num_parameters"] / 1e6
    say(f"\n{name}: {millions:.1f} M parameters, batch {batch_size}")
    case = _Case(model, batch, plan)
    result = head | measure(case)
    del case, model
    release_memory()
    return result


class _Case:
    """One model and batch: what is swept, timed and profiled."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, ...], plan: Plan) -> None:
        self.model, self.batch, self.plan = model, batch, plan
        self.groups = _graph_groups()
        self.not_measured: dict[str, str] = {}
        self.norm = variants.reference_norm(model, batch)

    def run(self) -> dict[str, Any]:
        bucketed, ddp = variants.bucketed, variants.ddp
        ours, theirs = self.groups.get("ours"), self.groups.get("ddp")
        captured_caps = self.plan.captured_caps_mib
        ours_captured = (self._maker(bucketed, cap, ours) for cap in captured_caps)
        ddp_captured = (
            self._maker(ddp, bucket_cap_mb=cap, views=True, group=theirs)
            for cap in captured_caps
        )
        warmup = variants.DDP_GRAPH_WARMUP
        swept = {
            "ours": self._sweep(
                self._maker(bucketed, cap) for cap in self.plan.our_caps_mib
            ),
            "ddp": self._sweep(self._ddp()),
            "ours captured": self._sweep(map(self._captured, ours_captured)),
            "ddp captured": self._sweep(
                self._captured(make, warmup) for make in ddp_captured
            ),
        }
        finals = self._build_finals(swept)
        steps: dict[str, Callable[[], object]] = {k: v.step for k, v in finals.items()}
        steps["all-reduce alone"] = alone = variants.all_reduce_alone(self.model)
        alone()
        times = time_in_turn(
            steps,
            num_rounds=self.plan.final_rounds,
            steps_a_round=self.plan.steps_a_round,
        )
        base = times["ddp best"].median_ns
        ratios = {k: round(t.median_ns / base, 4) for k, t in times.items()}
        for kind, samples in times.items():
            name = finals[kind].name if kind in finals else ""
            say(
                f"  {kind:<18}{samples.median_ns / 1e6:9.3f} ms  "
                f"{ratios[kind]:.3f}  {name}"
            )
        kernels = {k: self._profile(k, v) for k, v in finals.items()}
        for variant in finals.values():
            variant.close()
        bound = max(times["compute"].median_ns, times["all-reduce alone"].median_ns)
        described = {
            kind: {"name": variant.name, "settings": variant.settings}
            for kind, variant in finals.items()
        }
        return {
            "variants": {
                kind: described.get(kind, {}) | samples.to_json()
                for kind, samples in times.items()
            },
            "ratio_to_ddp_best": ratios,
            "bound_ms": round(bound / 1e6, 4),
            "sweeps_median_ms": {
                kind: {name: round(t.median_ns / 1e6, 4) for _, name, t in found}
                for kind, found in swept.items()
            },
            "not_measured": self.not_measured,
            "gradient_norm": self.norm,
            "kernels": {k: found for k, found in kernels.items() if found},
        }

    # What is tried.

    def _maker(
        self, make: Callable[..., Variant], *args: Any, **settings: Any
    ) -> Maker:
        return functools.partial(make, self.model, self.batch, *args, **settings)

    def _ddp(self) -> Iterator[Maker]:
        modes: tuple[dict[str, Any], ...] = (
            {"views": True},
            {"views": True, "zero": True},
        )
        caps, static = self.plan.caps_mib, (False, True)
        for cap, graph, mode in itertools.product(caps, static, modes):
            yield self._maker(
                variants.ddp, bucket_cap_mb=cap, static_graph=graph, **mode
            )

    def _captured(self, make: Maker, num_warmup: int = 3) -> Maker:
        return functools.partial(variants.captured, make, num_warmup=num_warmup)

    def _sweep(self, makers: Iterable[Maker]) -> Swept:
        """Each alone, one after the other; the best is timed again beside the rest."""
        found: Swept = []
        for make in makers:
            variant = self._build(make)
            if variant is None:
                continue
            times = time_in_turn(
                {variant.name: variant.step},
                num_rounds=self.plan.sweep_rounds,
                steps_a_round=self.plan.steps_a_round,
            )[variant.name]
            found.append((make, variant.name, times))
            say(f"    {variant.name:<34}{times.median_ns / 1e6:9.3f} ms")
            variant.close()
            del variant
            release_memory()
        return found

    def _build_finals(self, swept: Mapping[str, Swept]) -> dict[str, Variant]:
        compute = self._maker(variants.compute)
        makers: dict[str, Maker] = {"compute": compute}
        if self.plan.baselines:
            makers |= {
                "compute captured": self._captured(compute),
                "serial": self._maker(variants.serial),
                "per parameter": self._maker(variants.hooks),
            }
        makers |= {
            "ddp default": self._maker(variants.ddp),
            "ours default": self._maker(variants.bucketed),
        }
        for kind, found in swept.items():
            if found:
                best = min(found, key=lambda row: row[2].median_ns)[0]
                makers[kind if "captured" in kind else f"{kind} best"] = best
        built = {kind: self._build(make) for kind, make in makers.items()}
        return {kind: variant for kind, variant in built.items() if variant}

    def _build(self, make: Maker) -> Variant | None:
        """Build, warm up and check; None, with the reason kept, if it is refused."""
        try:
            variant = make()
        except CaptureError as error:
            self.not_measured[f"captured #{len(self.not_measured)}"] = str(error)
            say(f"    refused: {str(error)[:100]}")
            return None
        for _ in range(self.plan.warmup if variant.micro_batches == 1 else 2):
            variant.step()
        if variant.averages:
            variants.check_gradients(variant, self.norm)
        return variant

    def accumulate(self) -> dict[str, Any]:
        """A step is several backwards; all but the last are in `no_sync`."""
        ddp = functools.partial(
            self._maker, variants.ddp, micro_batches=self.plan.micro_batches
        )
        makers = [ddp(), *(ddp(bucket_cap_mb=c, views=True) for c in (100, 200))]
        makers.append(
            self._maker(variants.bucketed, micro_batches=self.plan.micro_batches)
        )
        built = [variant for make in makers if (variant := self._build(make))]
        times = time_in_turn(
            {variant.name: variant.step for variant in built},
            num_rounds=self.plan.final_rounds,
            steps_a_round=self.plan.steps_a_round,
        )
        for variant in built:
            variant.close()
        best = min(t.median_ns for name, t in times.items() if "ddp" in name)
        ratios = {k: round(t.median_ns / best, 4) for k, t in times.items()}
        for kind, samples in times.items():
            say(f"  {kind:<18}{samples.median_ns / 1e6:9.3f} ms  {ratios[kind]:.3f}")
        return {
            "micro_batches": self.plan.micro_batches,
            "variants": {name: samples.to_json() for name, samples in times.items()},
            "ratio_to_ddp_best": ratios,
        }

    def _profile(self, kind: str, variant: Variant) -> dict[str, Any]:
        if kind not in PROFILED or streams.device().type != "cuda":
            return {}
        variant.step()
        streams.synchronize()
        with profile() as profiled:
            variant.step()
        return kernel_sums(profiled.timeline)


@functools.cache
def _graph_groups() -> dict[str, dist.ProcessGroup]:
    """Communicators for captured steps alone.

    NCCL orders launches behind the graphs that hold its communicator, which makes
    every eager launch on it slower: mixing would charge the eager variants for it.
    """
    if dist.get_backend() != "nccl":
        return {}
    priority = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return {"ours": dist.new_group(pg_options=priority), "ddp": dist.new_group()}
