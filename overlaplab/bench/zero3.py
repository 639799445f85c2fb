"""ZeRO-3 steps with their optimizer: ours beside FSDP2 and DDP, measured in one run.

Every way to train is built, run at all batch sizes, measured and thrown away, one after
another, and that in rounds: so each has the device to itself, its peaks of memory are
its own, and all see the same machine in turn. The file is written after each.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.bench.profiled import of_last_to_come, profile_in_turn
from overlaplab.bench.sharded import WAYS, Training, settings_of
from overlaplab.bench.timing import Samples, agree, time_in_turn
from overlaplab.bench.workload import (
    MODELS,
    build_model,
    device_description,
    plans,
    random_batch,
    release_memory,
    say,
    write_from_rank_0,
)
from overlaplab.models import Transformer

MODEL_NAMES = ("gpt-738m", "gpt-2.9b", "gpt-369m")
PEER = "fsdp2"  # those whose names begin so: the best of them is what ratios are to
NORM_RTOL = 1e-2  # bfloat16 keeps 8 bits, and sums are taken in other orders


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    batches: tuple[int, ...] = (1, 2, 8, 16)  # sequences on each rank
    tokens: int = 1024  # of a sequence
    warmup: int = 2  # steps at each batch size before one is timed
    rounds: int = 6  # at most; the time that is left may allow fewer
    steps_a_round: int = 5  # counted steps at each batch size
    ways: tuple[str, ...] = tuple(WAYS)


(QUICK,) = plans("zero3", Plan).values()


def measure(
    results: dict[str, Any],
    names: Sequence[str],
    plan: Plan,
    out: Path | None,
    end: float,
) -> None:
    """All ways at all batch sizes of each model. Collective; rank 0 writes.

    Args:
        results: what the file begins with.
        names: of models.
        plan: of each.
        out: the file.
        end: seconds of `time.time()`; nothing new is begun later.
    """
    results |= {"world_size": dist.get_world_size(), **device_description()}
    results |= {"plan": asdict(plan), "models": (models := [])}
    _run_once("tiny")
    weights = [_weight(name) for name in names]
    gc.freeze()  # what was imported need not be looked through at each collection
    try:
        for number, name in enumerate(names):
            begin = time.time()
            share_s = (end - begin) * weights[number] / sum(weights[number:])
            case = _Model(name, plan, end, lambda: write_from_rank_0(results, out))
            models.append(case.result)
            case.run(begin + share_s)
            say(case.table())
    finally:
        gc.unfreeze()


def _weight(name: str) -> float:
    """About how long a model takes: launches, and what grows with its size."""
    with torch.device("meta"):
        model = Transformer(MODELS[name])
    return 2.5 + sum(p.numel() for p in model.parameters()) / 1e9


def _run_once(name: str) -> None:
    """Let libraries take what they keep, which is no variant's."""
    model, _ = build_model(name)
    batch = random_batch(MODELS[name], 1, 8, streams.device())
    for _ in range(2):
        model(*batch).backward()


class _Model:
    """One model: its ways to train, their times and their memory."""

    def __init__(
        self, name: str, plan: Plan, end: float, write: Callable[[], None]
    ) -> None:
        self.name, self.plan, self._end, self._write = name, plan, end, write
        config, device = MODELS[name], streams.device()
        self._batches = {
            size: random_batch(config, size, plan.tokens, device)
            for size in plan.batches
        }
        self._norm: float | None = None
        self._times: dict[tuple[str, int], list[int]] = {}
        self._profiling_s = 0.0
        self.result: dict[str, Any] = {
            "model": name,
            "rounds": 0,
            "not_measured": {},
            "memory": {},
            "cases": [
                {"batch": size, "variants": {}, "ratio_to_best_fsdp2": {}}
                for size in plan.batches
            ],
        }

    def run(self, until: float) -> None:
        """At least one round, if the time allows; more until `until`."""
        for number in range(self.plan.rounds):
            begin = time.time()
            for way in self.plan.ways:
                if way in self.result["not_measured"]:
                    continue
                if agree(time.time() > self._end):
                    if not number:
                        self.result["not_measured"][way] = "no time was left"
                    continue
                try:
                    self._measure(way, first=not number)
                except (RuntimeError, AssertionError, AttributeError) as error:
                    # Ranks fail alike, or the run ends: it costs no other's minutes.
                    self._drop(way, f"{type(error).__name__}: {error}")
                self._write()
            self.result["rounds"] = number + 1
            self._write()
            took = time.time() - begin - (0 if number else self._profiling_s)
            if agree(time.time() + took > until):
                break

    def _drop(self, way: str, why: str) -> None:
        self.result["not_measured"][way] = why
        for case in self.result["cases"]:
            case["variants"].pop(way, None)
        say(f"  {way}: not measured: {why[:200]}")

    def _measure(self, way: str, *, first: bool) -> None:
        """One round of one way, at all batch sizes. Collective."""
        release_memory()
        before = _allocated()
        model, head = build_model(self.name)
        self.result |= head
        others = before + sum(buffer.nbytes for buffer in model.buffers())
        training = WAYS[way](model)
        alive = [_allocated() - others]
        training.backward(self._batches[self.plan.batches[0]])
        alive.append(_allocated() - others)
        self._check(way, training.gradient_norm())
        training.update()
        alive.append(_allocated() - others)
        if first:
            self.result["memory"][way] = _memory(training, alive)
        for case in self.result["cases"]:
            self._time(way, training, case)
        if first:
            self._profile(way, training)

    def _time(self, way: str, training: Training, case: dict[str, Any]) -> None:
        size = case["batch"]
        step = self._step(training, size)
        release_memory()  # what other batch sizes left would count as reserved
        for _ in range(self.plan.warmup):
            step()
        if streams.device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        samples = time_in_turn(
            {way: step}, num_rounds=1, steps_a_round=self.plan.steps_a_round
        )[way]
        times = self._times.setdefault((way, size), [])
        times += samples.step_ns
        row = case["variants"].setdefault(way, {"settings": settings_of(way)})
        row |= Samples(tuple(times)).to_json()
        for kind, peak in _peaks().items():
            row[kind] = max(peak, row.get(kind, 0))
        case |= {"tokens": self.plan.tokens} | _ratios(case["variants"])

    def _step(self, training: Training, size: int) -> Callable[[], None]:
        batch: tuple[Tensor, ...] = self._batches[size]
        return lambda: training.step(batch)

    def _profile(self, way: str, training: Training) -> None:
        begin = time.time()
        steps = {str(size): self._step(training, size) for size in self._batches}
        found = of_last_to_come(profile_in_turn(steps, num_steps=1, ahead_ns=0))
        for case in self.result["cases"]:
            if kernels := found.get(str(case["batch"])):
                case["variants"][way]["kernels"] = kernels
        self._profiling_s += time.time() - begin

    def _check(self, way: str, norm: float) -> None:
        """Right first: the gradient of the first step is everybody's."""
        if self._norm is None:
            self.result["gradient_norm"] = self._norm = norm
        if not math.isclose(norm, self._norm, rel_tol=NORM_RTOL):
            raise AssertionError(
                f"{way}: the first gradient has norm {norm!r}, that of "
                f"{self.plan.ways[0]} {self._norm!r}"
            )

    def table(self) -> str:
        """What people read while it runs."""
        lines = [f"\n{self.name}: {self.result['rounds']} rounds"]
        for case in self.result["cases"]:
            lines.append(f"  batch {case['batch']}")
            for way, row in case["variants"].items():
                exposed = row.get("kernels", {}).get("exposed_ms", math.nan)
                gib = row.get("peak_allocated_bytes", 0) / 2**30
                ratio = case["ratio_to_best_fsdp2"].get(way, math.nan)
                lines.append(
                    f"    {way:<30}{row['median_ms']:9.2f} ms  {ratio:6.3f} of FSDP2  "
                    f"{exposed:8.2f} ms exposed  {gib:6.2f} GiB"
                )
        for way, row in self.result["memory"].items():
            if "ratio" in row:
                lines.append(f"  memory of {way}: {row['ratio']:.4f} of its summary")
        return "\n".join(lines)


def _ratios(variants: dict[str, Any]) -> dict[str, Any]:
    """Of each way's median to the best FSDP2's, and to DDP's."""
    medians = {way: row["median_ms"] for way, row in variants.items()}
    peers = [ms for way, ms in medians.items() if way.startswith(PEER)]
    found = {}
    for name, base in (
        ("ratio_to_best_fsdp2", min(peers, default=None)),
        ("ratio_to_ddp", medians.get("ddp")),
    ):
        if base:
            found[name] = {way: round(ms / base, 4) for way, ms in medians.items()}
    return found


def _memory(training: Training, alive: list[int]) -> dict[str, Any]:
    """What lives between steps, without the model's buffers, beside what was said.

    Args:
        alive: bytes after construction; after a backward, gradients in place; after
            the optimizer's first step, gradients dropped.
    """
    names = ("constructed_bytes", "with_gradients_bytes", "with_states_bytes")
    measured = streams.device().type == "cuda"
    found: dict[str, Any] = dict(zip(names, alive, strict=True)) if measured else {}
    if training.summary is not None:
        said = training.summary.total_bytes - training.summary.states_bytes
        found |= {"summary": asdict(training.summary), "said_bytes": said}
        if measured:
            found["ratio"] = round(found["with_gradients_bytes"] / said, 4)
    return found


def _allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _peaks() -> dict[str, int]:
    """Bytes, the largest of all ranks, since the last reset; {} on a CPU process."""
    device = streams.device()
    if device.type != "cuda":
        return {}
    mine = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    both = torch.tensor(mine, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    names = ("peak_allocated_bytes", "peak_reserved_bytes")
    return dict(zip(names, both.tolist(), strict=True))
