"""The benchmarks' command line: under torchrun, or starting its own processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from overlaplab.bench import compiled, data_parallel, traces, zero3
from overlaplab.bench import whole_steps as whole
from overlaplab.bench.checkpoint.command import checkpoint
from overlaplab.bench.double_buffer import measure as double_buffer
from overlaplab.bench.double_buffer.plan import BRIEF, PARTS, REHEARSAL, Plan
from overlaplab.bench.launches.command import launches
from overlaplab.bench.options import (
    POSITIVE,
    SETTINGS,
    backend_option,
    heading,
    rank_options,
    run_command,
    world_size_option,
)
from overlaplab.bench.predict.command import predict
from overlaplab.bench.sharded import WAYS
from overlaplab.bench.workload import (
    LINKS,
    MAIN,
    MODELS,
    device_description,
    write_from_rank_0,
)
from overlaplab.hardware import find_hardware
from overlaplab.processes import find_world_size, run_ranks, under_torchrun

models_option = click.option(
    "--models",
    multiple=True,
    type=click.Choice(list(MODELS)),
    help="Again for more.  [default: three]",
)


@click.group(context_settings=SETTINGS)
def benchmarks() -> None:
    """Measurements on your GPUs, each beside its peers in one run."""


@benchmarks.command("data-parallel")
@models_option
@click.option("--batches", multiple=True, type=POSITIVE, help="Again for more.")
@click.option("--tokens", type=POSITIVE, help="Sequence length.")
@click.option("--quick", is_flag=True, help="Fewer sweeps and rounds.")
@click.option("--accumulate", is_flag=True, help="Steps of four micro-batches alone.")
@rank_options
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
@click.option("--model", type=click.Choice(list(MODELS)), default=MAIN)
@click.option("--batches", multiple=True, type=POSITIVE, default=(2, 8))
@click.option("--tokens", type=POSITIVE, default=1024)
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


@benchmarks.command("compiler")
@click.option("--model", type=click.Choice(list(MODELS)), default=MAIN)
@click.option("--batches", multiple=True, type=POSITIVE, default=compiled.BATCHES)
@click.option(
    "--inductor/--no-inductor",
    default=None,
    help="What compiles long; minutes on a CPU.  [default: on GPUs]",
)
@click.option("--brief", is_flag=True, help="Fewer bucket sizes and rounds.")
@click.option("--whole-steps", is_flag=True, help="Steps with AdamW, and they alone.")
@click.option("--link", type=click.Choice(list(LINKS)), default="nvlink")
@click.option(
    "--hardware",
    help="What ours decides by: a profile's name or file.  [default: that of the link]",
)
@rank_options
def compiler_command(
    model: str,
    batches: Sequence[int],
    inductor: bool | None,
    brief: bool,
    whole_steps: bool,
    link: str,
    hardware: str | None,
    backend: str,
    world_size: int | None,
    out: Path | None,
) -> None:
    """Models whose communication our compiler inserts, beside compiled DDP."""
    plan = compiled.BRIEF if brief else compiled.Plan()
    if backend == "gloo":
        plan = compiled.REHEARSAL
    given = find_hardware(hardware) if hardware else compiled.HARDWARE[link]
    plan = replace(plan, hardware=given)
    if inductor is not None:
        plan = replace(plan, inductor=inductor)
    os.environ.update(LINKS[link])
    cases = [(model, batch, plan) for batch in batches]
    measure = whole.measure_case if whole_steps else compiled.measure_case
    measure_cases("compiler", measure, cases, out, backend, world_size)


@benchmarks.command("zero3")
@models_option
@click.option("--batches", multiple=True, type=POSITIVE, help="Again for more.")
@click.option("--ways", multiple=True, type=click.Choice(list(WAYS)), help="[all]")
@click.option("--tokens", type=POSITIVE, help="Sequence length.")
@click.option("--quick", is_flag=True, help="Fewer batch sizes and rounds.")
@click.option("--minutes", default=8.0, help="Nothing begins later.")
@rank_options
def zero3_command(
    models: Sequence[str],
    batches: tuple[int, ...],
    ways: tuple[str, ...],
    tokens: int | None,
    quick: bool,
    minutes: float,
    backend: str,
    world_size: int | None,
    out: Path | None,
) -> None:
    """Whole steps of `ol.Zero3` beside FSDP2 and DistributedDataParallel.

    Set NCCL_P2P_DISABLE=1 for a slow link: the results say so.
    """
    plan = zero3.QUICK if quick else zero3.Plan()
    plan = replace(
        plan,
        batches=batches or plan.batches,
        ways=ways or plan.ways,
        tokens=tokens or plan.tokens,
    )
    head, end = heading("zero3", backend), time.time() + 60 * minutes
    size = find_world_size(backend, world_size)
    on_all_ranks = partial(run_ranks, backend=backend, world_size=size)
    with tempfile.TemporaryDirectory() as folder:
        file = out or Path(folder, "zero3.json")
        zero3.measure(head, models or zero3.MODEL_NAMES, plan, file, end, on_all_ranks)


@benchmarks.command("double-buffer")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="[both]")
@click.option(
    "--link",
    "links",
    multiple=True,
    type=click.Choice(list(LINKS)),
    help="Of the reducers.  [both]",
)
@click.option("--batches", multiple=True, type=POSITIVE, help="Of the reducers.")
@click.option("--mib", multiple=True, type=POSITIVE, help="Of the loaders' batches.")
@click.option(
    "--loader",
    "loaders",
    multiple=True,
    type=click.Choice(Plan().loaders),
    help="Of the prefetcher.  [all]",
)
@click.option("--quick", is_flag=True, help="Fewer sizes and rounds.")
@click.option("--rounds", type=POSITIVE, help="At most, in the minutes that there are.")
@click.option("--minutes", default=3.5, help="Of each part, about.")
@rank_options
def double_buffer_command(
    parts: tuple[str, ...],
    links: tuple[str, ...],
    batches: tuple[int, ...],
    mib: tuple[float, ...],
    loaders: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    minutes: float,
    backend: str,
    world_size: int | None,
    out: Path | None,
) -> None:
    """`ol.BatchPrefetcher` and `ol.DoubleBufferedReducer` beside their peers."""
    plan = BRIEF if quick else Plan()
    if backend == "gloo":
        plan = REHEARSAL
    plan = replace(
        plan,
        batches=batches or plan.batches,
        batches_mib=mib or plan.batches_mib,
        loaders=loaders or plan.loaders,
        rounds=rounds or plan.rounds,
    )
    parts, links = parts or PARTS, links or tuple(LINKS)
    num_jobs = ("prefetch" in parts) + ("reducer" in parts) * len(links)
    if under_torchrun() and num_jobs > 1:
        raise ValueError(
            "torchrun's processes start NCCL once, and each part and link needs a "
            "start of its own. Choose one: --part prefetch, or --part reducer --link "
            "nvlink"
        )
    head = heading("double-buffer", backend)
    size = find_world_size(backend, world_size)
    on_all_ranks = partial(run_ranks, backend=backend, world_size=size)
    with tempfile.TemporaryDirectory() as folder:
        double_buffer.measure(
            head,
            parts,
            links,
            plan,
            out or Path(folder, "double_buffer.json"),
            minutes,
            on_all_ranks,
        )


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


benchmarks.add_command(checkpoint)
benchmarks.add_command(launches)
benchmarks.add_command(predict)


def main() -> int:
    return run_command(benchmarks, "overlaplab.bench")
