"""Step times of several variants, taken in turn so that all see the same machine.

A block runs a few steps back to back, as training does: the CPU may run ahead of the
GPU within it. Its first step is thrown away. Blocks of all variants take turns,
several rounds, so that clocks, temperature and neighbours disturb all alike.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlaplab import streams

Step = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """Times of one variant, each the slowest rank's."""

    step_ns: tuple[int, ...]  # one a step, in the order in which they were taken

    @property
    def median_ns(self) -> int:
        return int(statistics.median(self.step_ns))

    def quantile_ns(self, tenths: int) -> int:
        """The value below which `tenths` tenths of the samples lie."""
        ordered = sorted(self.step_ns)
        return ordered[min(len(ordered) - 1, tenths * len(ordered) // 10)]

    def to_json(self) -> dict[str, object]:
        return {
            "median_ms": round(self.median_ns / 1e6, 4),
            "p10_ms": round(self.quantile_ns(1) / 1e6, 4),
            "p90_ms": round(self.quantile_ns(9) / 1e6, 4),
            "samples_ms": [round(ns / 1e6, 4) for ns in self.step_ns],
        }


def run_block(step: Step, num_steps: int) -> list[int]:
    """This rank's times of `num_steps` steps, after one that is not counted."""
    if streams.device().type != "cuda":
        times = []
        for _ in range(num_steps + 1):
            start = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - start)
        return times[1:]
    step()
    marks = [streams.Event(enable_timing=True) for _ in range(num_steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    streams.synchronize()
    return [round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(marks)]


def time_in_turn(
    steps: Mapping[str, Step],
    *,
    num_rounds: int,
    steps_a_round: int,
    settling: Mapping[str, int] | None = None,
) -> dict[str, Samples]:
    """Time every step function in `num_rounds` rounds. Collective.

    Args:
        steps: warmed up; the same names in the same order on all ranks.
        num_rounds: blocks a variant.
        steps_a_round: counted steps a block.
        settling: by name, steps before each block: for what has worked ahead
            meanwhile, and for a clock that falls under load.

    Returns:
        For each name its samples: at every step the slowest rank's time.
    """
    mine: dict[str, list[int]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()  # a collection in one variant's step would be its misfortune
    try:
        for _ in range(num_rounds):
            for name, step in steps.items():
                dist.barrier()
                for _ in range((settling or {}).get(name, 0)):
                    step()
                mine[name] += run_block(step, steps_a_round)
    finally:
        gc.enable()
    return {name: slowest(times) for name, times in mine.items()}


def time_until(
    end: float,
    steps: Mapping[str, Step],
    *,
    num_rounds: int,
    steps_a_round: int,
    settling: Mapping[str, int],
) -> tuple[dict[str, Samples], int]:
    """`time_in_turn`, round after round: one, and more until `end`. Collective.

    Every other round takes the steps in the opposite order.

    Args:
        end: seconds of `time.time()`; no round but the first begins later.
        steps, steps_a_round, settling: see `time_in_turn`.
        num_rounds: at most.

    Returns:
        For each name its samples, and how many rounds there were.
    """
    times: dict[str, tuple[int, ...]] = dict.fromkeys(steps, ())
    rounds = 0
    while rounds < num_rounds and not agree(rounds > 0 and time.time() > end):
        # Back and forth: what one leaves behind does not fall on the same one always.
        turn = list(steps)[:: -1 if rounds % 2 else 1]
        found = time_in_turn(
            {name: steps[name] for name in turn},
            num_rounds=1,
            steps_a_round=steps_a_round,
            settling=settling,
        )
        times = {name: times[name] + found[name].step_ns for name in steps}
        rounds += 1
    return {name: Samples(its) for name, its in times.items()}, rounds


def exposed_rows(
    times: Mapping[str, Samples], alone: str
) -> dict[str, dict[str, object]]:
    """What results keep of each, with what it exposes: its median minus `alone`'s."""
    rows = {}
    for name, its in times.items():
        exposed_ns = its.median_ns - times[alone].median_ns
        rows[name] = its.to_json() | {
            "exposed_ms": round(exposed_ns / 1e6, 4),
            "exposed_percent": round(100 * exposed_ns / its.median_ns, 2),
        }
    return rows


def slowest(times_ns: list[int]) -> Samples:
    """Element-wise maximum over ranks."""
    tensor = torch.tensor(times_ns, dtype=torch.int64, device=streams.device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return Samples(tuple(tensor.tolist()))


def agree(mine: bool) -> bool:
    """Whether any rank says so."""
    flag = torch.tensor([int(mine)], device=streams.device())
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
