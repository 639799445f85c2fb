"""`checkpoint` of the benchmarks' command line."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from overlaplab.bench.checkpoint.measure import MENUS, REHEARSAL, Case, Plan
from overlaplab.bench.checkpoint.models import CASES
from overlaplab.bench.checkpoint.ranks import REHEARSAL as RANKS_REHEARSAL
from overlaplab.bench.checkpoint.ranks import TECHNIQUES, RanksPlan, measure_batch
from overlaplab.bench.options import check_device, heading, rank_options
from overlaplab.bench.workload import (
    LINKS,
    device_description,
    write_from_rank_0,
    write_json,
)
from overlaplab.processes import run_ranks


@click.command("checkpoint")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)))
@click.option("--menu", "menus", multiple=True, type=click.Choice(MENUS), help="[both]")
@click.option("--budgets", type=click.IntRange(2), help="Of ours, of each menu.")
@click.option("--batch", type=click.IntRange(1), help="Sequences.")
@click.option("--tokens", type=click.IntRange(1), help="Of a sequence.")
@click.option("--block-budget", "block_budgets", multiple=True, type=float)
@click.option("--whole-budget", "whole_budgets", multiple=True, type=float)
@click.option(
    "--whole-every", multiple=True, type=click.IntRange(0), help="0: none. [1, 2]"
)
@click.option(
    "--planned-whole", "planned_wholes", multiple=True, type=float, help="[1, 0.8]"
)
@click.option("--minutes", default=8.0, help="Of all cases; nothing begins later.")
@click.option("--link", "links", multiple=True, type=click.Choice(list(LINKS)))
@click.option("--technique", default="reducer", type=click.Choice(TECHNIQUES))
@rank_options
def checkpoint(
    cases: tuple[str, ...],
    menus: tuple[str, ...],
    budgets: int | None,
    batch: int | None,
    tokens: int | None,
    block_budgets: tuple[float, ...],
    whole_budgets: tuple[float, ...],
    whole_every: tuple[int, ...],
    planned_wholes: tuple[float, ...],
    minutes: float,
    links: tuple[str, ...],
    technique: str,
    backend: str,
    world_size: int | None,
    out: Path | None,
) -> None:
    """Planned checkpointing beside torch's budgets and rules, on one GPU.

    With --world-size 2 or more: with a reducer or Zero3, over each --link, the plan
    whose step is the shortest beside the one that computes least.
    """
    if world_size is not None and world_size > 1:
        ranks_plan = RanksPlan() if backend == "nccl" else RANKS_REHEARSAL
        menu = menus[0] if menus else ranks_plan.menu
        ranks_plan = replace(ranks_plan, technique=technique, menu=menu)
        if batch:
            ranks_plan = replace(ranks_plan, batches=(batch,))
        if tokens:
            sizes = replace(ranks_plan.sizes, tokens=tokens)
            ranks_plan = replace(ranks_plan, sizes=sizes)
        _on_ranks(
            cases or ("gpt",), ranks_plan, links, minutes, backend, world_size, out
        )
        return
    plan = Plan() if check_device(backend) else REHEARSAL
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
        whole_every=tuple(k for k in whole_every or plan.whole_every if k),
        planned_wholes=planned_wholes or plan.planned_wholes,
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


def _on_ranks(
    cases: Sequence[str],
    plan: RanksPlan,
    links: Sequence[str],
    minutes: float,
    backend: str,
    world_size: int,
    out: Path | None,
) -> None:
    """Each link in processes of its own, each batch written when it is measured."""
    links = links or (tuple(LINKS) if backend == "nccl" else ("nvlink",))
    share = minutes / (len(links) * len(cases) * len(plan.batches))
    head = heading("checkpoint-ranks", backend) | {"plan": asdict(plan)}
    work = [(name, plan, batch) for name in cases for batch in plan.batches]
    with tempfile.TemporaryDirectory() as folder:
        file = out or Path(folder, "checkpoint.json")
        write_json(head | {"cases": []}, file)
        for link in links:
            run_ranks(
                _measure,
                [(*row, link, share) for row in work],
                file,
                backend=backend,
                world_size=world_size,
                environment=LINKS[link],
            )


def _measure(work: Sequence[tuple[Any, ...]], file: Path) -> None:
    """On each rank."""
    results = json.loads(file.read_bytes())
    results |= {"world_size": dist.get_world_size(), **device_description()}
    for row in work:
        results["cases"].append(measure_batch(*row))
        write_from_rank_0(results, file)
