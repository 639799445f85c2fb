"""Races of lab 03 on real GPUs: how often values are wrong, and what torch's stream
sanitizer says. The sanitizer runs in a child process, so that it slows nothing here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlaplab
from overlaplab import streams

TRIES = 20
_DELAY_CYCLES = 3_000_000  # about 2 ms: a busy GPU, on purpose


def races(on_gpu: bool) -> dict[str, Any]:
    """Wrong results in 20 tries: broken and repaired, on a quiet and on a busy GPU."""
    if not on_gpu:
        return {"error": "needs a GPU"}
    programs: dict[str, Callable[[bool, bool], bool]] = {
        "one event for two": _event_is_wrong,
        "memory given away": _reuse_is_wrong,
    }
    answer: dict[str, Any] = {"tries": TRIES}
    for name, is_wrong in programs.items():
        answer[name] = {
            f"{variant}, {gpu}": sum(
                is_wrong(variant == "repaired", gpu == "busy") for _ in range(TRIES)
            )
            for variant in ("broken", "repaired")
            for gpu in ("quiet", "busy")
        }
    return answer


def _event_is_wrong(repaired: bool, busy: bool) -> bool:
    """3.3b: two producers, one event; the first is slow."""
    main = streams.current_stream()
    outs = [torch.zeros(2**16, device=streams.device()) for _ in range(2)]
    streams.synchronize()
    ready, events = streams.Event(), []
    for number, out in enumerate(outs):
        side = streams.Stream()
        side.wait_stream(main)
        with streams.stream(side):
            if busy and number == 0:
                torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
            out.fill_(1.0)
            ready.record()
            events.append(side.record_event())
    for event in events if repaired else [ready]:
        main.wait_event(event)
    total = outs[0] + outs[1]
    streams.synchronize()
    return not bool((total == 2.0).all())


def _reuse_is_wrong(repaired: bool, busy: bool) -> bool:
    """3.3c: a batch is dropped while the main stream still reads it."""
    main, loading = streams.current_stream(), streams.Stream()
    hosts = [torch.full((2**20,), float(i)).pin_memory() for i in (1, 2)]
    streams.synchronize()
    outs: list[torch.Tensor] = []
    for host in hosts:
        with streams.stream(loading):
            batch = host.to(streams.device(), non_blocking=True)
        main.wait_stream(loading)
        if repaired:
            batch.record_stream(main)
        if busy and not outs:
            torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
        outs.append(batch.clone())
        del batch  # the second gets its block
    streams.synchronize()
    wrong = any(not bool((out == i).all()) for i, out in enumerate(outs, start=1))
    del outs
    torch.cuda.empty_cache()
    return wrong


def sanitizer(on_gpu: bool) -> dict[str, Any]:
    """What TORCH_CUDA_SANITIZER=1 finds in races of the lab, and when repaired."""
    if not on_gpu:
        return {"error": "needs a GPU"}
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for variant in ("broken", "repaired"):
            answer[variant] = _under_sanitizer(variant)
    dist.barrier()
    return answer


def _under_sanitizer(variant: str) -> dict[str, Any]:
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    environment["TORCH_CUDA_SANITIZER"] = "1"
    package = str(Path(overlaplab.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        p for p in (package, os.environ.get("PYTHONPATH", "")) if p
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "races.py").write_text(_CHILD, encoding="utf-8")
        try:
            ran = subprocess.run(
                [sys.executable, "races.py", variant],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # the reports go there
                text=True,
                timeout=90,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": "no answer in 90 s"}
    answer: dict[str, Any] = {}
    for part in ran.stdout.split("#### ")[1:]:
        name, _, text = part.partition("\n")
        answer[name.strip()] = _shortened(text)
    if ran.returncode:
        last = ran.stdout.strip().splitlines()[-1:] or ["nothing printed"]
        answer["error"] = f"exit status {ran.returncode}: {last[0][:200]}"
    return answer


def _shortened(text: str) -> str:
    """Without this machine's folders; the first report only."""
    ours = r'File "[^"]*/((torch|overlaplab(_course)?)/[^"]*)"'
    text = re.sub(ours, r'File "\1"', text)
    text = re.sub(r'File "[^"]*/races\.py"', 'File "races.py"', text)
    lines = text.strip().splitlines()
    return "\n".join(line[:200] for line in lines[:40])


# One process, one GPU: the collectives have one rank, which is enough to see whether
# the sanitizer knows on which stream NCCL works.
_CHILD = """
import sys, tempfile, torch
import torch.distributed as dist
from overlaplab_course.lab03.four_races import PROGRAMS

torch.cuda.set_device(0)
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1,
        device_id=torch.device("cuda", 0),
    )
    for name, program in PROGRAMS.items():
        print("#### " + name, flush=True)
        try:
            program(sys.argv[1] == "repaired")
            torch.cuda.synchronize()
            print("no report", flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        torch.cuda.synchronize()
    dist.destroy_process_group()
"""
