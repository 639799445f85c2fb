"""One process a GPU (or some on the CPU) for measurements: no profiler, no pool.

Under torchrun the process is there already. Otherwise they are started here, and an
exception in one ends all.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

Worker = Callable[..., object]
CPU_PROCESSES = 2
_END_S = 10  # of a rank that failed, with what it tells its parent


def under_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ


def find_world_size(backend: str, asked: int | None = None) -> int:
    """How many processes to start: as many as asked for, or one a GPU.

    Raises:
        ValueError: so many GPUs are not there.
    """
    found = torch.cuda.device_count() if backend == "nccl" else CPU_PROCESSES
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if backend == "nccl" and found < here:
            raise ValueError(
                f"torchrun started {here} processes here, but {found} GPUs are found: "
                f"start it with --nproc-per-node={max(found, 1)}, or use --backend gloo"
            )
        return size
    size = asked or found
    if size < 1 or (backend == "nccl" and found < size):
        raise ValueError(
            f"{size or 'some'} GPUs asked for, {found} found. Use --world-size, "
            "or --backend gloo to rehearse on the CPU."
        )
    return size


def run_ranks(
    worker: Worker,
    *args: Any,
    backend: str,
    world_size: int,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    """Call `worker(*args)` on every rank of an initialised process group.

    Processes are spawned, so `worker` is a function of a module and `args` are
    picklable. The `environment` is set before anything of CUDA starts. The ranks remove
    the caller's `folder` if the caller is killed.
    """
    if under_torchrun():
        os.environ |= environment or {}
        _run(int(os.environ["LOCAL_RANK"]), backend, worker, args)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        **(environment or {}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
    }
    given = (os.getpid(), folder, settings, backend, worker, args)
    with _ended_by_sigterm():
        context: Any = spawn(_spawned, args=given, nprocs=world_size, join=False)  # type: ignore[no-untyped-call]
        try:
            while not context.join():
                pass
        except BaseException:
            for process in context.processes:
                process.kill()
                process.join()
            raise


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as an exception does: what it started ends first."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _ending_with(parent: int, folder: Path | None) -> Iterator[None]:
    """End this process soon after its parent, which may be killed.

    torch has it interrupted then, which ends Python and no collective.
    """

    def is_orphan() -> bool:
        if os.getppid() == parent:
            return False
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def watch() -> None:
        while not is_orphan():
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_orphan()


def _spawned(
    rank: int,
    parent: int,
    folder: Path | None,
    settings: Mapping[str, str],
    backend: str,
    worker: Worker,
    args: tuple[Any, ...],
) -> None:
    os.environ |= {**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with _ending_with(parent, folder):
        try:
            _run(rank, backend, worker, args)
        except Exception:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it in C++, too
            signal.alarm(_END_S)
            raise


def _run(local_rank: int, backend: str, worker: Worker, args: tuple[Any, ...]) -> None:
    _take_share_of_cores(local_rank, int(os.environ["WORLD_SIZE"]))
    device = None
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, device_id=device)
    is_done = False
    try:
        worker(*args)
        is_done = True
    finally:  # NCCL would wait for messages that a rank with an error never sends
        if is_done or backend != "nccl":
            dist.destroy_process_group()


def _take_share_of_cores(local_rank: int, num_local: int) -> None:
    """Ranks that share cores disturb one another where steps are launch-bound."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // int(os.environ.get("LOCAL_WORLD_SIZE", num_local))
    if share:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])
