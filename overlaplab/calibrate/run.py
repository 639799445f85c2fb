"""`overlaplab calibrate`: start the processes, measure, write the profile."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from overlaplab.calibrate.measure import (
    measure_device,
    measure_launches,
    measure_link,
)
from overlaplab.calibrate.plan import CPU, GPU, CalibrationPlan, quick
from overlaplab.calibrate.profile import build_profile
from overlaplab.hardware import Hardware, write_profile
from overlaplab.profiling.processes import find_world_size, run_ranks

_STAGES = 6  # that are told of, apart from the models


def calibrate(
    out: Path,
    *,
    backend: str | None = None,
    is_quick: bool = False,
    plan: CalibrationPlan | None = None,
) -> Hardware:
    """Measure this machine and write its profile to `out`.

    One process a GPU with "nccl", two on the CPU with "gloo". The file appears when all
    is measured, whole; an interrupt or an error leaves what was there before.

    Args:
        out: a file whose name ends in .json, as `hardware=` takes it.
        backend: "nccl" or "gloo"; None: by whether there are GPUs.
        is_quick: fewer models, sizes and repeats.
        plan: what to measure; None: the usual of the backend.

    Returns:
        The profile. On one GPU it has no link; its notes say so.

    Raises:
        ValueError: no such backend here, or a name without .json.
        OSError: the folder is missing or not writable; found before anything runs.
    """
    if out.suffix != ".json":
        raise ValueError(f"{out}: expected a name that ends in .json")
    if not os.access(out.parent, os.W_OK):
        raise FileNotFoundError(f"{out.parent}: no folder that can be written to")
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    size = find_world_size(backend)
    if plan is None:
        plan = GPU if backend == "nccl" else CPU
        plan = quick(plan) if is_quick else plan
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "measured.json")
        run_ranks(_measure, plan, answer, backend=backend, world_size=size)
        found = json.loads(answer.read_text())
    where = ", ".join(f"{key} {value}" for key, value in _describe(backend).items())
    hardware = build_profile(
        out.stem, found["device"], found["launches"], found["link"], where
    )
    write_profile(hardware, out)
    return hardware


def _measure(plan: CalibrationPlan, answer: Path) -> None:
    """One rank; rank 0 tells how far it is, and writes."""
    several = dist.get_world_size() > 1
    num_stages = len(plan.models) + _STAGES - (0 if several else 2)
    tell, stop = _teller(num_stages) if dist.get_rank() == 0 else (_silent, _nothing)
    try:
        found = {
            "device": measure_device(plan, tell),
            "link": measure_link(plan, tell) if several else None,
            "launches": measure_launches(plan, tell),
        }
    finally:
        stop()
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(found))


def _teller(num_stages: int) -> tuple[Callable[[str], None], Callable[[], None]]:
    """A bar on a terminal, a line a stage elsewhere."""
    if not sys.stderr.isatty():
        return (lambda what: print(what, file=sys.stderr, flush=True)), _nothing
    bar = Progress(
        TextColumn("calibrate"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
    )
    task = bar.add_task("", total=num_stages)
    bar.start()
    begun = False

    def tell(what: str) -> None:
        nonlocal begun
        bar.update(task, description=what, advance=1 if begun else 0)
        begun = True

    def stop() -> None:
        bar.update(task, description="measured", completed=num_stages)
        bar.stop()

    return tell, stop


def _silent(what: str) -> None: ...


def _nothing() -> None: ...


def _describe(backend: str) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__}
    if backend == "nccl":
        from torch.cuda.nccl import version

        read: Any = version
        found = {
            "card": torch.cuda.get_device_name(),
            **found,
            "NCCL": ".".join(map(str, read())),
        }
    return {**found, "on": datetime.now(UTC).strftime("%Y-%m-%d")}
