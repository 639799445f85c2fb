"""The benchmarks' command line: under torchrun, or starting its own processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from overlaplab.bench import data_parallel, traces
from overlaplab.bench.predict.compare import claim, compare, errors_table
from overlaplab.bench.predict.measure import (
    GPU,
    LINKS,
    REHEARSAL,
    describe,
    measure_on_link,
)
from overlaplab.bench.workload import (
    MAIN,
    MODELS,
    device_description,
    write_from_rank_0,
    write_json,
)
from overlaplab.calibrate.plan import CPU as CPU_PLAN
from overlaplab.calibrate.plan import GPU as GPU_PLAN
from overlaplab.processes import find_world_size, run_ranks
from overlaplab.version import find_version

# Of the minutes of `predict measure`, for the first of two links: it measures the
# device as well.
_FIRST_SHARE = 0.53

backend_option = click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    default="nccl",
    help="gloo rehearses on the CPU.",
)
world_size_option = click.option(
    "--world-size", type=int, help="Processes.  [default: all GPUs]"
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the results as JSON.",
)


SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(context_settings=SETTINGS)
def benchmarks() -> None:
    """Measurements on your GPUs, each beside its peers in one run."""


@benchmarks.command("data-parallel")
@click.option(
    "--models",
    multiple=True,
    type=click.Choice(list(MODELS)),
    help="Again for more.  [default: three]",
)
@click.option("--batches", multiple=True, type=int, help="Again for more.")
@click.option("--tokens", type=int, help="Sequence length.")
@click.option("--quick", is_flag=True, help="Fewer sweeps and rounds.")
@click.option("--accumulate", is_flag=True, help="Steps of four micro-batches alone.")
@backend_option
@world_size_option
@out_option
def data_parallel_command(
    models: Sequence[str],
    batches: Sequence[int],
    tokens: int | None,
    quick: bool,
    accumulate: bool,
    backend: str,
    world_size: int | None,
    out: Path | None,
) -> None:
    """Our reducers beside DistributedDataParallel."""
    plan = data_parallel.QUICK if quick else data_parallel.Plan()
    if tokens:
        plan = replace(plan, tokens=tokens)
    brief = plan if quick else replace(data_parallel.BRIEF, tokens=plan.tokens)
    cases = [
        (name, batch, plan if name == MAIN else brief)
        for name in models or data_parallel.CASES
        for batch in batches or data_parallel.CASES.get(name, (2,))
    ]
    measure = data_parallel.measure_case
    if accumulate:
        measure = data_parallel.measure_accumulation
    measure_cases("data-parallel", measure, cases, out, backend, world_size)


@benchmarks.command("traces")
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default=MAIN,
)
@click.option("--batches", multiple=True, type=int, default=(2, 8))
@click.option("--tokens", type=int, default=1024)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="For the traces: BATCH/VARIANT/rank_R.json.gz.",
)
@backend_option
@world_size_option
def traces_command(
    model: str,
    batches: Sequence[int],
    tokens: int,
    folder: Path,
    backend: str,
    world_size: int | None,
) -> None:
    """Traces of our reducers and of DistributedDataParallel, for `report`."""
    cases = [(model, batch, tokens, folder / f"b{batch}") for batch in batches]
    out = folder / "traces.json"
    measure_cases("traces", traces.measure_case, cases, out, backend, world_size)


@benchmarks.group("predict")
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
    stored = json.loads(measured.read_text())
    answer = compare(stored, lambda what: click.echo(what, err=True))
    write_json(answer, out)
    click.echo(errors_table(answer).markdown())
    click.echo(claim(answer))


def measure_cases(
    benchmark: str,
    measure: Callable[..., dict[str, Any]],
    cases: Sequence[tuple[Any, ...]],
    out: Path | None,
    backend: str,
    world_size: int | None,
) -> None:
    """Call `measure` with each of `cases` on all ranks; write after each.

    Args:
        measure: a function of a module; rank 0's answer counts.
    """
    head = heading(benchmark, backend)
    size = find_world_size(backend, world_size)
    work = (head, measure, cases, out)
    run_ranks(_measure_cases, *work, backend=backend, world_size=size)


def _measure_cases(
    results: dict[str, Any],
    measure: Callable[..., dict[str, Any]],
    cases: Sequence[tuple[Any, ...]],
    out: Path | None,
) -> None:
    found: list[dict[str, Any]] = []
    results |= {"world_size": dist.get_world_size(), **device_description()}
    for case in cases:
        found.append(measure(*case))
        write_from_rank_0({**results, "cases": found}, out)


def heading(
    benchmark: str, backend: str, program: str = "overlaplab.bench"
) -> dict[str, Any]:
    """What every file of results begins with, as far as the parent knows it."""
    return {
        "benchmark": benchmark,
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
        "overlaplab": find_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": backend,
    }


def run_command(command: click.Command, program: str) -> int:
    """Run a command line; the exit code. Errors are one line."""
    try:
        command.main(prog_name=f"python -m {program}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except click.Abort:
        return 130
    return 0


def main() -> int:
    return run_command(benchmarks, "overlaplab.bench")
