"""The kernels of steps under the profiler, several variants in one profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from overlaplab import streams
from overlaplab.bench.kernels import kernel_sums
from overlaplab.calibrate.clock import sleep
from overlaplab.profiling.profile import profile


def profile_in_turn(
    steps: Mapping[str, Callable[[], object]], *, num_steps: int, ahead_ns: int
) -> dict[str, dict[str, Any]]:
    """Several variants in one profile: to start one takes a second.

    Args:
        steps: warmed up; the same names in the same order on all ranks.
        num_steps: of each, in a row.
        ahead_ns: the device sleeps first, so that the CPU, which the profiler slows,
            launches ahead as it does in training.

    Returns:
        For each name the sums of its kernels, without "communication_ms"; {} on a
        CPU process.
    """
    if streams.device().type != "cuda":
        return {}
    with profile() as profiled:
        for step in steps.values():
            step()
            streams.synchronize()
            dist.barrier()
            streams.synchronize()
            profiled.step()  # what counts is the second of two steps
            if ahead_ns:
                sleep(ahead_ns)
            for _ in range(num_steps):
                step()
            streams.synchronize()
            profiled.step()
    found = {}
    for number, name in enumerate(steps):
        found[name] = kernel_sums(profiled.timeline.of_step(2 * number + 1))
        found[name].pop("communication_ms", None)
    return found


def of_last_to_come(mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each variant the sums of the rank that waits least for others.

    A collective's kernel runs from when its rank is there. Where another rank computes
    more slowly it waits, and what it waits is no communication.
    """
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    return {
        name: min((answer[name] for answer in answers), key=lambda k: k["nccl_ms"])
        for name in mine
    }
