"""Checkpoint plans on several GPUs: the shortest step beside the least recomputation.

Rank 0 measures costs and all ranks the wire; then, at budgets between the least and the
most, the plan that computes least and the one whose step ends first with its messages
take turns, with a `BucketedReducer` whose buckets are blocks, or under `Zero3`. Both
are predicted; under Zero3 budgets are those of a model that is not sharded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.bench.checkpoint.models import Sizes, build_case
from overlaplab.bench.timing import Samples, time_in_turn, time_until
from overlaplab.bench.workload import plans, release_memory, say
from overlaplab.hardware import Link, find_hardware
from overlaplab.techniques.data_parallel import BucketedReducer
from overlaplab.techniques.memory import (
    AppliedPlan,
    CheckpointPlan,
    Communication,
    Costs,
    measure_costs,
)
from overlaplab.techniques.zero import Zero3

_MIB = 2**20
_OPERATIONS = {"reducer": ("all_reduce",), "zero3": ("all_gather", "reduce_scatter")}
TECHNIQUES = tuple(_OPERATIONS)
_HARDWARE = "h200-nvlink"  # its links are replaced by the measured one


@dataclass(frozen=True, kw_only=True)
class RanksPlan:
    """How much to measure."""

    sizes: Sizes = field(default_factory=lambda: Sizes(gpt="gpt-369m", tokens=1024))
    technique: str = "reducer"  # or "zero3"
    # Of `measure.MENUS`. Eager blocks of a small batch are bound by their launches.
    menu: str = "compiled"
    compile_budgets: tuple[float, ...] = (1, 0.5)
    backend: str = "inductor"
    batches: tuple[int, ...] = (4, 6, 8)  # sequences on each rank
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)  # budgets, from the least to the most
    warmup: int = 3
    rounds: int = 12  # at most
    steps_a_round: int = 5


REHEARSAL = plans("checkpoint-ranks", RanksPlan)["rehearsal"]


def measure_batch(
    name: str, plan: RanksPlan, batch: int, link: str, minutes: float
) -> dict[str, Any]:
    """One model at one batch size. Collective.

    Args:
        name: of `models.CASES`.
        plan: how much.
        batch: sequences, or images, on each rank.
        link: what the results call it.
        minutes: no round but the first begins later.
    """
    end = time.time() + 60 * minutes
    release_memory()
    sizes = replace(plan.sizes, batch=batch, images=batch)
    model, inputs = build_case(name, sizes)
    costs = _costs_of_rank_0(model, inputs, plan)
    num_bytes = max(b.options[0].gradient_bytes for b in costs.chain.blocks)
    wire = _measure_link(num_bytes, plan)
    sent = Communication(
        world_size=dist.get_world_size(),
        hardware=replace(find_hardware(_HARDWARE), link=wire),
        operations=_OPERATIONS[plan.technique],
    )
    chosen = _plans(costs, sent, plan.shares)
    switch = _Switch(model, inputs, _technique(plan.technique, model, num_bytes))
    steps = {way: switch.step(its) for way, its in chosen.items()}
    for step in steps.values():
        for _ in range(plan.warmup):
            step()
    peaks = {way: switch.peak_bytes(its) for way, its in chosen.items()}
    times, rounds = time_until(
        end,
        steps,
        num_rounds=plan.rounds,
        steps_a_round=plan.steps_a_round,
        settling={},
    )
    rows = {
        way: times[way].to_json() | _said(its, times[way]) | peaks[way]
        for way, its in chosen.items()
    }
    switch.end()
    say(f"{name}, batch {batch}, {link}")
    for way, row in rows.items():
        say(
            f"  {way:<34}{row['median_ms']:9.2f} ms, predicted "
            f"{row['predicted_ms']:9.2f}, computing {row['predicted_compute_ms']:9.2f}"
        )
    return {
        "model": name,
        "technique": plan.technique,
        "batch": batch,
        "link": link,
        "wire": asdict(wire),
        "block_gradient_bytes": num_bytes,
        "rounds": rounds,
        "ratios": _ratios(rows),
        "variants": rows,
    }


def _costs_of_rank_0(
    model: nn.Module, inputs: tuple[Tensor, ...], plan: RanksPlan
) -> Costs:
    """The same costs everywhere, or ranks would plan otherwise."""
    found: list[Any] = [None]
    compiled = plan.menu == "compiled"
    # Under Zero3 modules are called as such, or nobody gathers their weights.
    parts = ("finish",) if compiled and plan.technique != "zero3" else ()
    if dist.get_rank() == 0:
        costs = measure_costs(
            model,
            inputs,
            hardware="measured",
            compile=compiled,
            compile_budgets=plan.compile_budgets,
            compiled_parts=parts,
            backend=plan.backend,
        )
        found = [costs]
    dist.broadcast_object_list(found, 0)
    taken: Costs = found[0]
    return taken


def _measure_link(num_bytes: int, plan: RanksPlan) -> Link:
    """Latency and bandwidth of all-reduces of about a block's gradients."""
    device = streams.device()
    sizes = (max(1, num_bytes // 4), max(2, num_bytes))
    buffers = {
        str(n): torch.ones(-(-n // 4), dtype=torch.float32, device=device)
        for n in sizes
    }

    def reduce(buffer: Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(buffer, dist.ReduceOp.MAX)

    times = time_in_turn(
        {name: reduce(buffer) for name, buffer in buffers.items()},
        num_rounds=5,
        steps_a_round=2 * plan.steps_a_round,
    )
    small_ns, large_ns = (times[str(n)].median_ns for n in sizes)
    ranks = dist.get_world_size()
    crossing = 2 * (ranks - 1) / ranks  # of a ring, for each byte
    slope = max(1e-6, (large_ns - small_ns) / (sizes[1] - sizes[0]) / max(1, crossing))
    latency = max(0, round(large_ns - slope * crossing * sizes[1]))
    return Link(
        latency_ns=latency, bytes_per_s=round(1e9 / slope), source="measured here"
    )


def _plans(
    costs: Costs, sent: Communication, shares: tuple[float, ...]
) -> dict[str, CheckpointPlan]:
    """Those without, and at each budget both, where they differ."""
    curve = costs.frontier()
    most, least = curve[0].peak_bytes, curve[-1].peak_bytes
    found = {"none": replace(costs.none(), communication=sent)}
    for share in sorted(shares, reverse=True):
        budget = least + round(share * (most - least))
        recompute = replace(costs.fastest(budget), communication=sent)
        step = costs.fastest(budget, sent)
        found[f"least recompute, {share:g}"] = recompute
        if step.choice != recompute.choice:
            found[f"shortest step, {share:g}"] = step
    names = [option.policy for option in costs.chain.blocks[0].options]
    policy = next(name for name in names if name.endswith("recompute"))
    every = replace(costs.every(1, policy), communication=sent)
    return found | {"every block": every}


def _technique(name: str, model: nn.Module, num_bytes: int) -> BucketedReducer | Zero3:
    if name == "zero3":
        return Zero3(model)
    return BucketedReducer(model, bucket_mib=num_bytes / _MIB)


class _Switch:
    """Steps of one model under several plans: the plan is changed between blocks."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Tensor, ...],
        technique: BucketedReducer | Zero3,
    ) -> None:
        self._model, self._inputs, self._technique = model, inputs, technique
        self._trained = list(model.parameters())
        if isinstance(technique, Zero3):
            self._trained = technique.shards()
        self._plan: CheckpointPlan | None = None
        self._applied: AppliedPlan | None = None

    def step(self, plan: CheckpointPlan) -> Callable[[], object]:
        def run() -> None:
            if self._plan is not plan:
                self.end()
                self._plan, self._applied = plan, plan.apply(self._model)
            for parameter in self._trained:
                parameter.grad = None
            self._model(*self._inputs).backward()
            self._technique.wait()

        return run

    def peak_bytes(self, plan: CheckpointPlan) -> dict[str, int]:
        """Of a step on this rank; what the technique needs is in no prediction."""
        if streams.device().type != "cuda":
            return {}
        self.step(plan)()
        streams.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step(plan)()
        streams.synchronize()
        return {"peak_bytes": torch.cuda.max_memory_allocated()}

    def end(self) -> None:
        if self._applied is not None:
            self._applied.undo()
        self._plan = self._applied = None


def _said(plan: CheckpointPlan, times: Samples) -> dict[str, Any]:
    predicted = plan.step_ns
    return {
        "predicted_ms": round(predicted / 1e6, 4),
        "predicted_compute_ms": round((predicted - plan.exposed_ns) / 1e6, 4),
        "predicted_peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "step_error_percent": round(100 * (predicted / times.median_ns - 1), 2),
        "policies": dict(Counter(plan.names)),
        "order": list(plan.names),
    }


def _ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Where they differ: the shortest step to the least recomputation."""
    found = {}
    for name, row in rows.items():
        if name.startswith("shortest step"):
            other = rows[name.replace("shortest step", "least recompute")]
            found[name] = {
                "measured": round(row["median_ms"] / other["median_ms"], 4),
                "predicted": round(row["predicted_ms"] / other["predicted_ms"], 4),
            }
            say(f"  {name}, to least recompute: {found[name]}")
    return found
