"""ZeRO-3 steps with their optimizer: ours beside FSDP2 and DDP, measured in one run.

Every way to train is built and measured at all batch sizes, one after another, and that
in rounds. Each time it has the processes and the devices to itself: so its peaks of
memory are its own, no other's communicators share the device's queues with it, and all
see the same machine in turn. The file is written after each.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.bench.memory import allocated_bytes, lasting_memory, peaks
from overlaplab.bench.profiled import of_last_to_come, profile_in_turn
from overlaplab.bench.sharded import WAYS, Training, settings_of
from overlaplab.bench.timing import Samples, time_in_turn
from overlaplab.bench.workload import (
    MODELS,
    build_model,
    device_description,
    plans,
    random_batch,
    release_memory,
    write_from_rank_0,
    write_json,
)
from overlaplab.errors import OverlaplabError
from overlaplab.models import Transformer

MODEL_NAMES = ("gpt-738m", "gpt-2.9b", "gpt-369m")
PEER = "fsdp2"  # those whose names begin so: the best of them is what ratios are to
NORM_RTOL = 1e-2  # bfloat16 keeps 8 bits, and sums are taken in other orders


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    batches: tuple[int, ...] = (1, 2, 8, 16)  # sequences on each rank
    tokens: int = 1024  # of a sequence
    warmup: int = 5  # steps at each batch size before one is timed: a graph needs four
    rounds: int = 6  # at most; the time that is left may allow fewer
    steps_a_round: int = 5  # counted steps at each batch size
    ways: tuple[str, ...] = tuple(WAYS)


(QUICK,) = plans("zero3", Plan).values()


def measure(
    head: dict[str, Any],
    names: Sequence[str],
    plan: Plan,
    out: Path,
    end: float,
    on_all_ranks: Callable[..., None],
) -> None:
    """All ways at all batch sizes of each model, each in processes of its own.

    Args:
        head: what the file begins with.
        names: of models.
        plan: of each.
        out: the file.
        end: seconds of `time.time()`; nothing new is begun later.
        on_all_ranks: calls a function with arguments on every rank of a new job.
    """
    results = head | {"plan": asdict(plan), "models": []}
    write_json(results, out)
    weights = [_weight(name) for name in names]
    for number, name in enumerate(names):
        begin = time.time()
        share_s = (end - begin) * weights[number] / sum(weights[number:])
        _measure_model(name, plan, out, begin + share_s, end, on_all_ranks)


def _measure_model(
    name: str,
    plan: Plan,
    out: Path,
    until: float,
    end: float,
    on_all_ranks: Callable[..., None],
) -> None:
    """At least one round, if the time allows; more until `until`."""
    results = json.loads(out.read_bytes())
    model = _empty(name, plan)
    results["models"].append(model)
    write_json(results, out)
    for number in range(plan.rounds):
        begin = time.time()
        for way in plan.ways:
            if way in model["not_measured"]:
                continue
            if time.time() > end:
                if not number:
                    model["not_measured"][way] = "no time was left"
            else:
                print(f"{name}, round {number + 1}: {way}", file=sys.stderr, flush=True)
                try:
                    on_all_ranks(measure_way, way, plan, out)
                except Exception as error:  # what ends a job costs no other's time
                    _drop(model, way, str(error).strip().splitlines()[-1])
                    write_json(results, out)
                else:
                    results = json.loads(out.read_bytes())
                    model = results["models"][-1]
        model["rounds"] = number + 1
        write_json(results, out)
        if time.time() + (time.time() - begin) > until:
            break
    print(_table(model), flush=True)


def _empty(name: str, plan: Plan) -> dict[str, Any]:
    cases = [
        {"batch": size, "variants": {}, "ratio_to_best_fsdp2": {}}
        for size in plan.batches
    ]
    return {
        "model": name,
        "rounds": 0,
        "not_measured": {},
        "memory": {},
        "cases": cases,
    }


def _drop(model: dict[str, Any], way: str, why: str) -> None:
    model["not_measured"][way] = why
    for case in model["cases"]:
        case["variants"].pop(way, None)


def measure_way(way: str, plan: Plan, out: Path) -> None:
    """One round of one way, of the last model of the file. Collective; rank 0 writes.

    Args:
        way: of `WAYS`.
        plan: of the model.
        out: the file that has what was measured before.
    """
    results = json.loads(out.read_bytes())
    dist.barrier()  # all have read
    results |= {"world_size": dist.get_world_size(), **device_description()}
    _run_once("tiny")
    gc.freeze()  # what was imported need not be looked through at each collection
    model = results["models"][-1]
    try:
        _Way(way, plan, model).run()
    except (RuntimeError, OverlaplabError, AssertionError, AttributeError) as error:
        _drop(model, way, f"{type(error).__name__}: {error}")  # ranks fail alike
    finally:
        gc.unfreeze()
    write_from_rank_0(results, out)


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


class _Way:
    """One way to train: its times and its memory, added to a model's results."""

    def __init__(self, way: str, plan: Plan, result: dict[str, Any]) -> None:
        self._way, self._plan, self._result = way, plan, result
        config, device = MODELS[result["model"]], streams.device()
        self._batches = {
            size: random_batch(config, size, plan.tokens, device)
            for size in plan.batches
        }

    def run(self) -> None:
        """One round, at all batch sizes."""
        release_memory()
        first = self._way not in self._result["memory"]
        before = allocated_bytes()
        model, head = build_model(self._result["model"])
        self._result |= head
        others = before + sum(buffer.nbytes for buffer in model.buffers())
        training = WAYS[self._way](model)
        batch = self._batches[self._plan.batches[0]]
        training.backward(batch)
        self._check(training.gradient_norm())
        training.update()
        if first:
            self._result["memory"][self._way] = lasting_memory(training, batch, others)
        for case in self._result["cases"]:
            step = self._step(training, case["batch"])
            self._time(step, case)
            if first:
                self._profile(step, case)
        training.close()

    def _time(self, step: Callable[[], None], case: dict[str, Any]) -> None:
        release_memory()  # what other batch sizes left would count as reserved
        if streams.device().type == "cuda":  # a graph allocates when it is captured
            torch.cuda.reset_peak_memory_stats()
        for _ in range(self._plan.warmup):
            step()
        samples = time_in_turn(
            {self._way: step}, num_rounds=1, steps_a_round=self._plan.steps_a_round
        )[self._way]
        row = case["variants"].setdefault(
            self._way, {"settings": settings_of(self._way)}
        )
        times = [round(ms * 1e6) for ms in row.get("samples_ms", ())]
        row |= Samples((*times, *samples.step_ns)).to_json()
        for kind, peak in peaks().items():
            row[kind] = max(peak, row.get(kind, 0))
        case |= {"tokens": self._plan.tokens} | _ratios(case["variants"])

    def _step(self, training: Training, size: int) -> Callable[[], None]:
        batch: tuple[Tensor, ...] = self._batches[size]
        return lambda: training.step(batch)

    def _profile(self, step: Callable[[], None], case: dict[str, Any]) -> None:
        mine = profile_in_turn({self._way: step}, num_steps=1, ahead_ns=0)
        if kernels := of_last_to_come(mine).get(self._way):
            case["variants"][self._way]["kernels"] = kernels

    def _check(self, norm: float) -> None:
        """Right first: the gradient of the first step is everybody's."""
        expected = self._result.setdefault("gradient_norm", norm)
        if not math.isclose(norm, expected, rel_tol=NORM_RTOL):
            raise AssertionError(
                f"{self._way}: the first gradient has norm {norm!r}, that of "
                f"{self._plan.ways[0]} {expected!r}"
            )


def _table(model: dict[str, Any]) -> str:
    """What people read while it runs."""
    lines = [f"\n{model['model']}: {model['rounds']} rounds"]
    for case in model["cases"]:
        lines.append(f"  batch {case['batch']}")
        for way, row in case["variants"].items():
            exposed = row.get("kernels", {}).get("exposed_ms", math.nan)
            gib = row.get("peak_allocated_bytes", 0) / 2**30
            ratio = case["ratio_to_best_fsdp2"].get(way, math.nan)
            lines.append(
                f"    {way:<30}{row['median_ms']:9.2f} ms  {ratio:6.3f} of FSDP2  "
                f"{exposed:8.2f} ms exposed  {gib:6.2f} GiB"
            )
    lines += [f"  {way}: {why}" for way, why in model["not_measured"].items()]
    for way, row in model["memory"].items():
        if "ratio" in row:
            lines.append(f"  memory of {way}: {row['ratio']:.4f} of its summary")
    return "\n".join(lines)


def _ratios(variants: dict[str, Any]) -> dict[str, Any]:
    """Of each way's median to the best FSDP2's, and to DDP's.

    A captured step is compared with captured ones, which have no launches to wait for.
    """
    medians = {way: row["median_ms"] for way, row in variants.items()}
    found: dict[str, Any] = {}
    for name, peer in (("ratio_to_best_fsdp2", PEER), ("ratio_to_ddp", "ddp")):
        best: dict[bool, float] = {}
        for way, ms in medians.items():
            if way.startswith(peer):
                captured = _is_captured(way)
                best[captured] = min(ms, best.get(captured, ms))
        ratios = {
            way: round(ms / best[_is_captured(way)], 4)
            for way, ms in medians.items()
            if _is_captured(way) in best
        }
        if ratios:
            found[name] = ratios
    return found


def _is_captured(way: str) -> bool:
    return bool(settings_of(way).get("captured"))
