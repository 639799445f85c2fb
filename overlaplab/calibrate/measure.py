"""All measurements of a calibration, in order, as JSON values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from overlaplab.calibrate import kernels, launch, link, operators
from overlaplab.calibrate.clock import on_cuda
from overlaplab.calibrate.plan import CPU, GPU, CalibrationPlan

Tell = Callable[[str], None]


def default_plan() -> CalibrationPlan:
    return GPU if on_cuda() else CPU


def measure_device(plan: CalibrationPlan, tell: Tell) -> dict[str, Any]:
    """What does not need a link. Collective where there is a process group."""
    found: dict[str, Any] = {}
    tell("matrix products")
    found["matmuls"] = kernels.measure_matmuls(plan)
    tell("memory")
    found["memory"] = kernels.measure_memory(plan)
    found["small_kernel"] = kernels.measure_small_kernel(plan)
    tell("copies to and from the host")
    found["host_copies"] = kernels.measure_host_copies(plan)
    found["models"] = []
    for number, case in enumerate(plan.models, 1):
        tell(f"operators of model {number} of {len(plan.models)}")
        found["models"].append(operators.measure_operators(plan, case))
    return _of_slowest(found)


def _of_slowest(found: dict[str, Any]) -> dict[str, Any]:
    """The answer of the rank with the slowest device: the others wait for it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    steps = [[model["step_ns"] for model in answer["models"]] for answer in answers]
    slowest = max(range(len(steps)), key=lambda rank: sum(steps[rank]))
    return {**answers[slowest], "rank": slowest, "step_ns_by_rank": steps}


def measure_link(plan: CalibrationPlan, tell: Tell) -> dict[str, Any]:
    """Collectives and what they cost beside computing. Collective; 2 ranks or more."""
    tell("collectives")
    found: dict[str, Any] = {
        "num_ranks": dist.get_world_size(),
        "collectives": link.measure_collectives(plan),
        "collective_launches_ns": link.measure_collective_launches(plan),
    }
    tell("computing beside collectives")
    found["contention"] = link.measure_contention(plan)
    return found


def measure_launches(plan: CalibrationPlan, tell: Tell) -> dict[str, Any]:
    """The CPU's part. Collective where there is a process group."""
    tell("launches")
    return launch.measure_launches(plan)
