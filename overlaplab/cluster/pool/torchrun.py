"""A run in a world that torchrun started: no process is ours, every one is a rank.

All processes call; each gets every rank's value. Nobody outside watches, so a timer in
each process ends it after the deadline, and torchrun then ends the others.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.membership import Init, Member, accepting_init, empty_store
from overlaplab.cluster.pool.pickling import dump_call, dumps, loads
from overlaplab.cluster.pool.pool import Outcome
from overlaplab.cluster.settings import seeded
from overlaplab.profiling.sessions import recording
from overlaplab.profiling.trace.ranks import timeline_of_ranks

_EXIT_CODE = 124  # as coreutils' timeout


def run_in_world(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backend: str,
    timeout_s: float,
) -> Outcome:
    """Call `fn` as this process's rank; see `Pool.run`.

    An exception of this rank is raised as it is. The world stays initialised, or is so
    again if the function destroyed it. Works that nobody waited for are not noticed
    here. On several machines the ranks' times differ by what the machines' clocks do.

    Raises:
        ValueError: torch.distributed is initialised with another backend.
    """
    _join(backend)
    rank = dist.get_rank()
    device = streams.device()
    cuda = device.type == "cuda"
    call = dump_call(fn, args, kwargs)
    member = _member(backend)
    with _deadline(timeout_s, rank), seeded():
        own_fn, own_args, own_kwargs = loads(call, device)
        with (
            accepting_init(lambda: member),
            empty_store(f"run {next(_num_runs)}"),
            recording(cuda=cuda, align=dist.barrier) as record,
        ):
            result = own_fn(*own_args, **own_kwargs)
        if not dist.is_initialized():
            member.connect(dist.init_process_group)
        mine = (dumps(result, detach=True), record.spans(rank))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return Outcome(
        tuple(loads(value) for value, _ in everyone),
        timeline_of_ranks(
            {r: spans for r, (_, spans) in enumerate(everyone)},
            origin=backend,
            num_ranks=len(everyone),
        ),
        (),
    )


def _join(backend: str) -> None:
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(backend)
        if backend == "gloo":
            atexit.register(_leave)
        return
    existing = str(dist.get_backend())
    if backend not in existing:
        raise ValueError(
            f"cluster={backend!r}, but this process's torch.distributed is initialised "
            f"with {existing!r}: initialise it with {backend!r}, or leave it to run"
        )


def _leave() -> None:
    """End gloo's threads before the interpreter does: now and then that aborts."""
    if dist.is_initialized():
        dist.destroy_process_group()


_num_connected = itertools.count()  # after a destruction; equal on all ranks
_num_runs = itertools.count()  # likewise


def _member(backend: str) -> Member:
    rank, size = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()

    def connect(init: Init) -> None:
        where = dist.distributed_c10d.PrefixStore(
            f"overlaplab {next(_num_connected)}", store
        )
        init(backend, store=where, rank=rank, world_size=size)

    return Member(rank, size, (backend,), connect)


@contextmanager
def _deadline(timeout_s: float, rank: int) -> Iterator[None]:
    def end() -> None:
        print(
            f"RunTimeoutError: rank {rank} passed its deadline of {timeout_s:g} s; it "
            "was here:",
            file=sys.__stderr__,
            flush=True,
        )
        faulthandler.dump_traceback(2, all_threads=True)
        os._exit(_EXIT_CODE)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
