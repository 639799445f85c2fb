"""`launches` of the benchmarks' command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from overlaplab.bench.launches.cases import GPU, MODULES, OPTIMIZERS, SMALL
from overlaplab.bench.launches.measure import measure_launches
from overlaplab.bench.options import (
    backend_option,
    check_device,
    heading,
    out_option,
)
from overlaplab.bench.workload import device_description, write_json


@click.command("launches")
@click.option("--module", "modules", multiple=True, type=click.Choice(list(MODULES)))
@click.option(
    "--optimizer", "optimizers", multiple=True, type=click.Choice(list(OPTIMIZERS))
)
@backend_option
@out_option
def launches(
    modules: tuple[str, ...],
    optimizers: tuple[str, ...],
    backend: str,
    out: Path | None,
) -> None:
    """What CUDA launches for 25 modules and 6 optimizers, on one GPU.

    Those that are named by options, or all.
    """
    on_gpu = check_device(backend)
    head = heading("launches", backend) | device_description()

    def write(found: dict[str, Any]) -> None:
        write_json(head | found, out)

    if not modules and not optimizers:
        modules, optimizers = tuple(MODULES), tuple(OPTIMIZERS)
    measure_launches(GPU if on_gpu else SMALL, modules, optimizers, write)
    click.echo(f"measured; {out or 'not kept: name a file by --out'}")
