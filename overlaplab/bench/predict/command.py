"""`predict` of the benchmarks' command line."""

from __future__ import annotations

import time
from pathlib import Path

import click

from overlaplab.bench.options import (
    POSITIVE,
    backend_option,
    heading,
    out_option,
    results_of,
    world_size_option,
)
from overlaplab.bench.predict.compare import claim, compare, errors_table
from overlaplab.bench.predict.measure import (
    GPU,
    REHEARSAL,
    describe,
    measure_on_link,
)
from overlaplab.bench.predict.zero3 import predict_zero3
from overlaplab.bench.workload import LINKS, device_description, write_json
from overlaplab.calibrate.plan import CPU as CPU_PLAN
from overlaplab.calibrate.plan import GPU as GPU_PLAN
from overlaplab.hardware import find_hardware
from overlaplab.processes import find_world_size, run_ranks

# Of the minutes of `predict measure`, for the first of two links: it measures the
# device as well.
_FIRST_SHARE = 0.53


@click.group("predict")
def predict() -> None:
    """The virtual cluster's steps against measured ones."""


@predict.command("measure")
@click.option("--minutes", default=8.0, help="No case begins later.")
@backend_option
@world_size_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The file of measurements, for `predict compare`.",
)
def measure_command(
    minutes: float, backend: str, world_size: int | None, out: Path
) -> None:
    """Calibrate this machine and time the grid, on two GPUs."""
    grid, plan = (GPU, GPU_PLAN) if backend == "nccl" else (REHEARSAL, CPU_PLAN)
    if out.exists():
        raise ValueError(f"{out} is there already; name another file or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    size = find_world_size(backend, world_size or 2)
    head = heading("predict", backend) | {"world_size": size, **device_description()}
    head |= {"settings": describe(grid, plan)}
    begin = time.time()
    for number, link in enumerate(grid.links, 1):
        run_ranks(
            measure_on_link,
            head,
            link,
            grid,
            plan,
            out,
            begin + minutes * 60 * (_FIRST_SHARE if number == 1 else 1),
            backend=backend,
            world_size=size,
            environment=LINKS[link],
        )


@predict.command("compare")
@click.argument("measured", type=click.Path(path_type=Path, exists=True))
@out_option
def compare_command(measured: Path, out: Path | None) -> None:
    """Predict what MEASURED holds, from its calibration; no GPU is needed."""
    with results_of(measured, "predict") as stored:
        answer = compare(stored, lambda what: click.echo(what, err=True))
    write_json(answer, out)
    click.echo(errors_table(answer).markdown())
    click.echo(claim(answer))


@predict.command("zero3")
@click.argument("measured", type=click.Path(path_type=Path, exists=True))
@click.option("--models", multiple=True, help="Of MEASURED.  [default: all]")
@click.option("--batches", multiple=True, type=POSITIVE, help="[default: all]")
@click.option("--hardware", default="h200-nvlink", help="A profile, or its file.")
@out_option
def zero3_command(
    measured: Path,
    models: tuple[str, ...],
    batches: tuple[int, ...],
    hardware: str,
    out: Path | None,
) -> None:
    """Predict the steps that `zero3` measured; no GPU is needed."""
    machine = find_hardware(hardware)
    with results_of(measured, "zero3") as stored:
        for row in predict_zero3(stored, machine, models, batches):
            write_json(stored, out)
            click.echo(row)
