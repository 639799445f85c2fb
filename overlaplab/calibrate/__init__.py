"""`overlaplab calibrate`: measure this machine, and make a hardware profile of it.

What is measured is data (`plan`); `device`, `launch`, `link` and `contention` measure
it; `profile` makes a `Hardware` of the measurements, which are JSON values.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from overlaplab.calibrate.busy import Shares
from overlaplab.calibrate.contention import measure_between
from overlaplab.calibrate.device import measure_device
from overlaplab.calibrate.launch import measure_launches
from overlaplab.calibrate.plan import CPU, GPU, CalibrationPlan
from overlaplab.calibrate.profile import build_profile
from overlaplab.hardware import Hardware, write_profile
from overlaplab.hardware.kinds import KINDS
from overlaplab.processes import find_world_size, run_ranks, under_torchrun

# That are reported, apart from the models: alone, and between GPUs besides.
_STAGES, _STAGES_BETWEEN = 4, 2 + len(KINDS)

_FREE = 0.9  # of a core and a GPU, that a rank gets where nothing else runs
_BUSY = (
    "this machine was busy: a rank got {} % of its {}. Times are longer than the "
    "machine's, latencies most of all: calibrate again when nothing else runs"
)


def calibrate(
    out: Path,
    *,
    backend: str | None = None,
    plan: CalibrationPlan | None = None,
) -> Hardware:
    """Measure this machine and write its profile to `out`.

    One process a GPU with "nccl", two on the CPU with "gloo". The file appears when all
    is measured, whole; an interrupt or an error leaves what was there before. Under
    torchrun, on one machine, its processes are the ranks; rank 0 writes.

    Args:
        out: a file whose name ends in .json, as `hardware=` takes it.
        backend: "nccl" or "gloo"; None: by whether there are GPUs.
        plan: what to measure; None: the usual of the backend.

    Returns:
        The profile. On one GPU it has no link; its notes say so, and "busy" if the
        machine had other work.

    Raises:
        ValueError: no such backend here, a name without .json, or torchrun on several
            machines.
        OSError: the folder is missing or not writable; found before anything runs.
    """
    if out.suffix != ".json":
        raise ValueError(f"{out}: expected a name that ends in .json")
    if not os.access(out.parent, os.W_OK):
        raise FileNotFoundError(f"{out.parent}: no folder that can be written to")
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    size = find_world_size(backend)
    if under_torchrun() and int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        raise ValueError(
            "calibrate measures one machine, and torchrun started processes on "
            "several: start it with --nnodes=1, or without torchrun"
        )
    if plan is None:
        plan = GPU if backend == "nccl" else CPU
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "measured.json")
        run_ranks(
            _measure,
            plan,
            answer,
            backend=backend,
            world_size=size,
            folder=Path(folder),
        )
        found = json.loads(answer.read_text())
    shares: dict[str, float] = found.pop("shares")
    hardware = build_profile(out.stem, **found, where=_describe(backend))
    what = min(shares, key=shares.__getitem__)
    if shares[what] < _FREE:
        busy = _BUSY.format(round(100 * shares[what]), what)
        hardware = replace(hardware, notes={**hardware.notes, "busy": busy})
    if writes():
        write_profile(hardware, out)
    return hardware


def writes() -> bool:
    """Whether this process writes what is measured: under torchrun, rank 0 alone."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def _measure(plan: CalibrationPlan, answer: Path) -> None:
    """One rank; rank 0 reports how far it is.

    The ranks of torchrun have an `answer` each, others one that rank 0 writes.
    """
    several = dist.get_world_size() > 1
    num_stages = len(plan.models) + _STAGES + (_STAGES_BETWEEN if several else 0)
    shares = Shares()
    with _reporting(num_stages) as report:

        def stage(what: str) -> None:
            report(what)
            shares.look()

        measured = {
            "device": measure_device(plan, stage),
            "link": measure_between(plan, stage) if several else None,
            "launches": measure_launches(plan, stage),
        }
    shares.look()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, shares.means())
    least = {what: min(one[what] for one in of_ranks) for what in of_ranks[0]}
    found = [{**measured, "shares": least}]
    dist.broadcast_object_list(found)
    if dist.get_rank() == 0 or under_torchrun():
        answer.write_text(json.dumps(found[0]))


@contextlib.contextmanager
def _reporting(num_stages: int) -> Iterator[Callable[[str], None]]:
    """On rank 0 a bar on a terminal, or a line per stage elsewhere."""
    if dist.get_rank():
        yield lambda what: None
        return
    if not sys.stderr.isatty():
        yield lambda what: print(what, file=sys.stderr, flush=True)
        return
    bar = Progress(
        TextColumn("calibrate"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
    )
    task = bar.add_task("", total=num_stages, completed=-1)  # the first begins
    with bar:
        yield lambda what: bar.update(task, description=what, advance=1)
        bar.update(task, description="measured", completed=num_stages)


def _describe(backend: str) -> str:
    found: dict[str, Any] = {"torch": torch.__version__}
    if backend == "nccl":
        read: Any = torch.cuda.nccl.version
        nccl = ".".join(map(str, read()))
        found = {"card": torch.cuda.get_device_name(), **found, "NCCL": nccl}
    found["on"] = datetime.now(UTC).strftime("%Y-%m-%d")
    return ", ".join(f"{key} {value}" for key, value in found.items())


def table(hardware: Hardware) -> str:
    """The main numbers of a profile, in the units that people use."""
    link = hardware.link
    rows = [
        (f"{dtype} products", _rate(rate))
        for dtype, rate in hardware.flops_per_s.items()
        if dtype != "default"
    ]
    rows += [
        ("device memory", f"{hardware.memory_bytes_per_s / 1e9:.0f} GB/s"),
        ("shortest kernel", f"{hardware.kernel_floor_ns / 1e3:.1f} us"),
        ("launch, forward", f"{hardware.launch_ns / 1e3:.1f} us"),
        ("launch, backward", f"{(hardware.backward_launch_ns or 0) / 1e3:.1f} us"),
    ]
    if "compute_rate_permille" in hardware.notes:
        rows += [
            ("collective launch", f"{hardware.collective_launch_ns / 1e3:.1f} us"),
            ("link latency", f"{link.latency_ns / 1e3:.1f} us"),
            ("link", f"{link.bytes_per_s / 1e9:.1f} GB/s"),
            ("compute beside it", f"{hardware.compute_rate_permille / 10:.0f} %"),
            ("link beside compute", f"{hardware.wire_rate_permille / 10:.0f} %"),
        ]
    else:
        rows.append(("link", hardware.notes["link"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    if busy := hardware.notes.get("busy"):
        lines += ["", f"Warning: {busy}."]
    return "\n".join(lines)


def _rate(flops_per_s: int) -> str:
    if flops_per_s >= 10**12:
        return f"{flops_per_s / 1e12:.1f} TFLOP/s"
    return f"{flops_per_s / 1e9:.1f} GFLOP/s"
