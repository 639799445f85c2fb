"""The benchmarks' command line: under torchrun, or starting its own processes."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from overlaplab.bench import data_parallel, lessons
from overlaplab.bench.kernels import device_description


def main() -> int:
    options = parse(sys.argv[1:])
    if "WORLD_SIZE" in os.environ:  # torchrun
        run_rank(int(os.environ["LOCAL_RANK"]), options)
        return 0
    found = torch.cuda.device_count() if options.backend == "nccl" else 2
    size = options.world_size or found
    if size < 1 or (options.backend == "nccl" and found < size):
        print(
            f"error: {size or 'some'} GPUs asked for, {found} found. Use --world-size, "
            "or --backend gloo to rehearse on the CPU.",
            file=sys.stderr,
        )
        return 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["WORLD_SIZE"] = str(size)
    spawn(_spawned, args=(options,), nprocs=size)  # type: ignore[no-untyped-call]
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m overlaplab.bench")
    parser.add_argument("benchmark", choices=["data-parallel", "lessons"])
    parser.add_argument("--lesson", help="lessons: which one, such as 03")
    parser.add_argument(
        "--models", nargs="+", choices=list(data_parallel.MODELS), metavar="MODEL"
    )
    parser.add_argument("--batches", nargs="+", type=int, metavar="N")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--world-size", type=int, help="processes; default all GPUs")
    parser.add_argument("--tokens", type=int, default=None, help="sequence length")
    parser.add_argument("--quick", action="store_true", help="fewer sweeps and rounds")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--traces", type=Path, help="folder for Chrome traces")
    return parser.parse_args(arguments)


def _spawned(rank: int, options: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    run_rank(rank, options)


def run_rank(local_rank: int, options: argparse.Namespace) -> None:
    """One process: measure every case, let rank 0 write after each."""
    _take_share_of_cores(local_rank, int(os.environ["WORLD_SIZE"]))
    device = None
    if options.backend == "nccl":
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(options.backend, device_id=device)
    plan = data_parallel.QUICK if options.quick else data_parallel.Plan()
    if options.tokens:
        plan = replace(plan, tokens=options.tokens)
    results: dict[str, Any] = {
        "benchmark": options.benchmark,
        "command": "python -m overlaplab.bench " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": options.backend,
        "world_size": dist.get_world_size(),
        **device_description(),
        "cases": [],
    }
    try:
        if options.benchmark == "lessons":
            results |= {"lesson": options.lesson, **lessons.measure(options.lesson)}
            del results["cases"]
            _write(results, options.out)
            return
        for name in options.models or data_parallel.CASES:
            if not options.quick and name != data_parallel.MAIN:
                plan = replace(plan, **data_parallel.BRIEF)
            for batch in options.batches or data_parallel.CASES.get(name, (2,)):
                case = data_parallel.measure_case(name, batch, plan, options.traces)
                results["cases"].append(case)
                _write(results, options.out)
    finally:
        dist.destroy_process_group()


def _write(results: dict[str, Any], out: Path | None) -> None:
    if out and dist.get_rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


def _take_share_of_cores(local_rank: int, num_local: int) -> None:
    """Ranks that share cores disturb one another where steps are launch-bound."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // int(os.environ.get("LOCAL_WORLD_SIZE", num_local))
    if share:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])
