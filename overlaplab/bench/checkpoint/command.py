"""`checkpoint` of the benchmarks' command line."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from overlaplab import streams
from overlaplab.bench.checkpoint.measure import MENUS, REHEARSAL, Case, Plan
from overlaplab.bench.checkpoint.models import CASES
from overlaplab.bench.options import backend_option, heading, out_option
from overlaplab.bench.workload import device_description, write_json


@click.command("checkpoint")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)))
@click.option("--menu", "menus", multiple=True, type=click.Choice(MENUS), help="[both]")
@click.option("--budgets", type=click.IntRange(2), help="Of ours, of each menu.")
@click.option("--batch", type=click.IntRange(1), help="Sequences.")
@click.option("--tokens", type=click.IntRange(1), help="Of a sequence.")
@click.option("--block-budget", "block_budgets", multiple=True, type=float)
@click.option("--whole-budget", "whole_budgets", multiple=True, type=float)
@click.option("--minutes", default=8.0, help="Of all cases; nothing begins later.")
@backend_option
@out_option
def checkpoint(
    cases: tuple[str, ...],
    menus: tuple[str, ...],
    budgets: int | None,
    batch: int | None,
    tokens: int | None,
    block_budgets: tuple[float, ...],
    whole_budgets: tuple[float, ...],
    minutes: float,
    backend: str,
    out: Path | None,
) -> None:
    """Planned checkpointing beside torch's budgets and rules, on one GPU."""
    on_gpu = backend == "nccl"
    if on_gpu != (streams.device().type == "cuda"):
        raise ValueError(
            f"--backend {backend} and a process on {streams.device()}: nccl measures "
            "a GPU, gloo rehearses on the CPU of a machine without one"
        )
    plan = Plan() if on_gpu else REHEARSAL
    sizes = replace(
        plan.sizes,
        batch=batch or plan.sizes.batch,
        tokens=tokens or plan.sizes.tokens,
    )
    plan = replace(
        plan,
        sizes=sizes,
        budgets=budgets or plan.budgets,
        menus=menus or plan.menus,
        block_budgets=block_budgets or plan.block_budgets,
        whole_budgets=whole_budgets or plan.whole_budgets,
    )
    names = cases or tuple(CASES)
    end = time.time() + 60 * minutes
    head = heading("checkpoint", backend) | device_description()
    head["plan"] = asdict(plan)
    done: list[dict[str, Any]] = []

    def write(found: dict[str, Any]) -> None:
        write_json(head | {"cases": [*done, found]}, out)

    for number, name in enumerate(names):
        click.echo(f"\n{name}")
        now = time.time()
        until = now + (end - now) / (len(names) - number)
        done.append(Case(name, plan, until, write).run())
    click.echo(f"measured; {out or 'not kept: name a file by --out'}")
