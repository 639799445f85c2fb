"""Peaks and step times of checkpoint plans beside their peers, in one run on one GPU.

First costs are taken, then the peers are measured, then our plans: at budgets between
the least and the most, and at each peak that a peer reached. Times are of rounds in
which all take turns; the file is written after each stage.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from overlaplab import streams
from overlaplab.bench.checkpoint.models import Sizes, build_case
from overlaplab.bench.checkpoint.variants import Variant, planned, whole
from overlaplab.bench.timing import Samples, run_block
from overlaplab.bench.variants import gradient_norm
from overlaplab.bench.workload import plans, release_memory
from overlaplab.techniques.memory import BudgetError, Costs, measure_costs

_GIB = 2**30
# The allocator's counters have one and the same step at one MiB more in some runs.
_SAME_BYTES = 2**20
MENUS = ("eager", "compiled")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    sizes: Sizes = field(default_factory=Sizes)
    budgets: int = 12  # of ours, for each menu
    menus: tuple[str, ...] = MENUS
    block_budgets: tuple[float, ...] = (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    every: tuple[int, ...] = (1, 2, 3, 4)
    selective: tuple[str, ...] = (
        "keep attention",
        "keep attention, matmuls",
        "keep attention, every 2nd matmul",
    )
    # torch's, of the whole model, in the order of what is missed most
    whole_budgets: tuple[float, ...] = (1, 0.8, 0.6, 0.2, 0.4, 0.1, 0.5, 0.3, 0)
    whole_every: tuple[int, ...] = (1, 2)
    planned_wholes: tuple[float, ...] = (1, 0.8)  # of them, what plans may choose
    backend: str = "inductor"
    warmup: int = 3
    rounds: int = 8  # at most
    steps_a_round: int = 6


REHEARSAL = plans("checkpoint", Plan)["rehearsal"]


class Case:
    """One model: everything that is measured of it.

    Args:
        name: of `models.CASES`.
        plan: how much.
        end: seconds of `time.time()`; nothing begins later.
        write: is given the results after each stage.
    """

    def __init__(
        self, name: str, plan: Plan, end: float, write: Callable[[dict[str, Any]], None]
    ) -> None:
        from torch import _dynamo

        _dynamo.reset()
        _dynamo.config.recompile_limit = 64  # one model's code, many compilers
        self._plan, self._begin, self._end, self._write = plan, time.time(), end, write
        release_memory()
        self._on_gpu = streams.device().type == "cuda"
        if self._on_gpu:
            torch._C._cuda_clearCublasWorkspaces()
        self._before_bytes = torch.cuda.memory_allocated() if self._on_gpu else 0
        self._model, self._batch = build_case(name, plan.sizes)
        self._variants: list[Variant] = []
        self.results: dict[str, Any] = {
            "model": name,
            "num_parameters": sum(p.numel() for p in self._model.parameters()),
            "costs": {},
            "not_measured": {},
            "variants": {},
        }

    def run(self) -> dict[str, Any]:
        """All stages."""
        costs = {}
        for menu in self._plan.menus:
            start = time.time()
            costs[menu] = self._costs(menu)
            seconds = round(time.time() - start, 2)
            self.results["costs"][menu] = _described(costs[menu]) | {"s": seconds}
            _say(f"  costs, {menu}: {seconds} s")
            self._write(self.results)
        share = self._begin + 0.6 * (self._end - self._begin)
        for variant in self._peers(costs):
            if time.time() > share:
                self._drop(variant, "no time was left")
            else:
                self._try(variant)
        for variant in self._ours(costs):
            if time.time() > self._end:
                self._drop(variant, "no time was left")
            else:
                self._try(variant)
        for number in range(self._plan.rounds):
            if time.time() > self._end:
                break
            # Back and forth: those that come first find a cooler GPU.
            for variant in self._variants[:: -1 if number % 2 else 1]:
                variant.step_ns += self._timed(variant)
            self.results["rounds"] = number + 1
            self._note_times()
        self._note_ratios()
        self._write(self.results)
        return self.results

    def _costs(self, menu: str) -> Costs:
        compiled = menu == "compiled"
        return measure_costs(
            self._model,
            self._batch,
            hardware="measured",
            compile=compiled,
            compile_budgets=self._plan.block_budgets,
            compiled_parts=("finish",) if compiled else (),
            backend=self._plan.backend,
            whole_budgets=self._plan.planned_wholes if compiled else (),
        )

    def _peers(self, costs: dict[str, Costs]) -> Iterator[Variant]:
        plan, model = self._plan, self._model
        if eager := costs.get("eager"):
            yield planned("eager, none", "eager", model, eager.none(), is_peer=True)
            for k in plan.every:
                name = f"eager, every {k}"
                yield planned(name, "eager", model, eager.every(k), is_peer=True)
            for policy in plan.selective:
                its = eager.every(1, policy)
                yield planned(f"eager, {policy}", "eager", model, its, is_peer=True)
        if "compiled" in costs:
            first, *others = [
                *(whole(model, b, 0, plan.backend) for b in plan.whole_budgets)
            ]
            yield first
            for k in plan.whole_every:
                yield whole(model, 1.0, k, plan.backend)
            yield from others

    def _ours(self, costs: dict[str, Costs]) -> Iterator[Variant]:
        """Plans that differ, of each menu: over budgets, and at the peers' peaks."""
        peers = [v for v in self._variants if v.is_peer]
        for menu, its in costs.items():
            most = its.fastest(2**62).peak_bytes
            try:
                least = its.fastest(0).peak_bytes
            except BudgetError as error:
                least = error.least_bytes
            steps = max(1, self._plan.budgets - 1)
            budgets = [
                least + (most - least) * number // steps
                for number in range(self._plan.budgets)
            ]
            budgets += [
                v.results["peak_bytes"] + _SAME_BYTES
                for v in peers
                if v.results["peak_bytes"]
            ]
            seen = set()
            for number, budget in enumerate(sorted(budgets, reverse=True)):
                if budget < least:
                    continue
                plan = its.fastest(budget)
                if (key := (plan.choice, plan.whole)) in seen:
                    continue
                seen.add(key)
                name = f"ours {menu} {number}, {budget / _GIB:.3f} GiB"
                yield planned(name, menu, self._model, plan, is_peer=False)

    def _try(self, variant: Variant) -> None:
        start = time.time()
        try:
            self._measure(variant)
        except RuntimeError as error:
            self._drop(variant, f"{type(error).__name__}: {str(error).strip()[:300]}")
            release_memory()
            return
        variant.results["first_s"] = round(time.time() - start, 2)
        self._variants.append(variant)
        self.results["variants"][variant.name] = variant.results
        self._note_times()
        row = variant.results
        said = ""
        if variant.plan is not None:
            said = (
                f"  predicted {row['predicted_ms']:8.2f} ms "
                f"{row['predicted_peak_bytes'] / _GIB:7.3f} GiB"
            )
        _say(
            f"  {variant.name:<44}{row['median_ms']:9.2f} ms "
            f"{(row['peak_bytes'] or 0) / _GIB:7.3f} GiB{said}"
        )
        self._write(self.results)

    def _drop(self, variant: Variant, why: str) -> None:
        self.results["not_measured"][variant.name] = why
        _say(f"  {variant.name:<44} not measured: {why[:100]}")

    def _measure(self, variant: Variant) -> None:
        """Warm, its peak, its gradients, and a first few times."""
        with variant.enter() as run:
            for _ in range(self._plan.warmup):
                self._step(run)
            streams.synchronize()
            gc.collect()
            if self._on_gpu:
                torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(1)
            loss = self._step(run)
            streams.synchronize()
            peak = torch.cuda.max_memory_allocated() if self._on_gpu else 0
            norm = gradient_norm(self._model)
            self._model.zero_grad()
            variant.step_ns += run_block(lambda: self._step(run), 3)
        variant.results |= {
            "kind": variant.kind,
            "is_peer": variant.is_peer,
            "peak_bytes": peak - self._before_bytes if self._on_gpu else None,
            "loss": float(loss),
            "gradient_norm": norm,
        }
        if variant.plan is not None:
            plan = variant.plan
            variant.results |= {
                "budget_bytes": plan.budget_bytes,
                "predicted_peak_bytes": plan.peak_bytes,
                "predicted_ms": round(plan.step_ns / 1e6, 4),
                "predicted_launch_ms": round(plan.launch_ns / 1e6, 4),
                "policies": dict(Counter(plan.names)),
                "order": list(plan.names),
                "holders": plan.holders,
            }

    def _step(self, run: Callable[..., Any]) -> torch.Tensor:
        self._model.zero_grad()
        loss: torch.Tensor = run(*self._batch)
        torch.autograd.backward(loss)
        return loss.detach()

    def _timed(self, variant: Variant) -> list[int]:
        with variant.enter() as run:
            return run_block(lambda: self._step(run), self._plan.steps_a_round)

    def _note_times(self) -> None:
        for variant in self._variants:
            row = variant.results
            row |= Samples(tuple(variant.step_ns)).to_json()
            if variant.plan is not None:
                predicted = row["predicted_ms"]
                row["step_error_percent"] = _percent(predicted, row["median_ms"])
                if row["peak_bytes"]:
                    predicted = row["predicted_peak_bytes"]
                    row["peak_error_percent"] = _percent(predicted, row["peak_bytes"])

    def _note_ratios(self) -> None:
        """At each peer's peak: our fastest that needs no more than it, to its step."""
        ours = [v for v in self._variants if not v.is_peer]
        for peer in (v for v in self._variants if v.is_peer):
            limit = (peer.results["peak_bytes"] or 0) + _SAME_BYTES
            fits = [v for v in ours if (v.results["peak_bytes"] or 0) <= limit]
            if fits:
                best = min(fits, key=lambda v: v.results["median_ms"])
                ratio = best.results["median_ms"] / peer.results["median_ms"]
                peer.results["ours"] = [best.name, round(ratio, 4)]
                _say(f"  at {peer.name}: {best.name} takes {ratio:.3f} of its step")
        rows = [v.results for v in self._variants if v.plan is not None]
        for what in ("step_error_percent", "peak_error_percent"):
            errors = [abs(row[what]) for row in rows if what in row]
            if errors:
                self.results[what] = {
                    "median": statistics.median(errors),
                    "worst": max(errors),
                }
                _say(f"  {what}: {self.results[what]}")


def _percent(predicted: float, measured: float) -> float:
    return round(100 * (predicted - measured) / measured, 3)


def _described(costs: Costs) -> dict[str, Any]:
    """The numbers that plans were made of; menus once for each kind of block."""
    chain = costs.chain
    menus = list(dict.fromkeys(block.options for block in chain.blocks))
    return {
        "resident_bytes": chain.resident_bytes,
        "first_bytes": chain.first_bytes,
        "last_bytes": chain.last_bytes,
        "rest_ns": chain.rest_ns,
        "notes": chain.notes,
        "wholes": [asdict(whole) for whole in costs.wholes],
        "menus": [[asdict(option) for option in menu] for menu in menus],
        "blocks": [
            {
                "name": block.name,
                "menu": menus.index(block.options),
                "forward_bytes": block.forward_bytes,
                "backward_bytes": block.backward_bytes,
                "after_forward_bytes": block.after_forward_bytes,
                "before_backward_bytes": block.before_backward_bytes,
            }
            for block in chain.blocks
        ],
    }


def _say(text: str) -> None:
    print(text, flush=True)
