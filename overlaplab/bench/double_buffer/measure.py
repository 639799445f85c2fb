"""What two of everything wins: batches and gradients, each beside its peers in one run.

Part `prefetch`: `ol.BatchPrefetcher` beside copies by hand and torch's workers, before
a computation of known length. Part `reducer`: `ol.DoubleBufferedReducer` beside
`ol.BucketedReducer` and DistributedDataParallel. In both, *exposed* is a step minus the
step that computes only, of the same rounds. Each link of `reducer` has processes of its
own, since NCCL reads its settings when it starts; the file is written after each case.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.bench.double_buffer import delayed, prefetched
from overlaplab.bench.double_buffer.plan import Plan
from overlaplab.bench.workload import (
    LINKS,
    device_description,
    say,
    write_from_rank_0,
    write_json,
)


def measure(
    head: Mapping[str, Any],
    parts: Sequence[str],
    links: Sequence[str],
    plan: Plan,
    out: Path,
    minutes: float,
    on_all_ranks: Callable[..., None],
) -> None:
    """The parts one after the other; each in processes of its own.

    Args:
        head: what the file begins with.
        parts: of `plan.PARTS`.
        links: of `LINKS`, for the reducers.
        plan: of both.
        out: the file.
        minutes: that each part may take.
        on_all_ranks: calls a function with arguments on every rank of a new job, with
            `environment` set.
    """
    write_json({**head, "plan": asdict(plan), "cases": []}, out)
    if "prefetch" in parts:
        end = time.time() + 60 * minutes
        on_all_ranks(measure_prefetch, plan, out, end, environment={})
    if "reducer" in parts:
        begin = time.time()
        for number, link in enumerate(links, 1):
            end = begin + 60 * minutes * number / len(links)
            on_all_ranks(
                measure_reducers, link, plan, out, end, environment=LINKS[link]
            )


def measure_prefetch(plan: Plan, out: Path, end: float) -> None:
    """All sizes of batches. Collective; rank 0 writes, and says what it found."""
    torch.set_num_threads(plan.fill_threads)
    sizes = list(plan.batches_mib)
    for number, mib in enumerate(sizes):
        until = time.time() + (end - time.time()) / (len(sizes) - number)
        for case in prefetched.cases(mib, plan, until):
            _keep({"part": "prefetch", **case}, out)
            say(prefetched.table(case))


def measure_reducers(link: str, plan: Plan, out: Path, end: float) -> None:
    """All batch sizes of a model. Collective; rank 0 writes, and says what it found."""
    for number, size in enumerate(plan.batches):
        until = time.time() + (end - time.time()) / (len(plan.batches) - number)
        case = {"part": "reducer", "link": link}
        case |= delayed.measure_case(size, plan, until)
        _keep(case, out)
        say(delayed.table(case))


def _keep(case: Mapping[str, Any], out: Path) -> None:
    if dist.get_rank() == 0:
        results = json.loads(out.read_bytes())
        results |= {"world_size": dist.get_world_size()}
        described = device_description()
        case = {**case, "environment": described.pop("environment", {})}
        results |= described
        results["cases"].append(case)
        write_from_rank_0(results, out)
    dist.barrier()
