"""Four small races, each with its repair: for the virtual cluster's findings and for
torch's stream sanitizer. The same code runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from overlaplab import streams

SIZE = 1024


def event(repaired: bool) -> torch.Tensor:
    """3.3b: one event recorded on two streams stands for the second only."""
    main = streams.current_stream()
    outs = [torch.zeros(SIZE, device=streams.device()) for _ in range(2)]
    ready, events = streams.Event(), []
    for out in outs:
        side = streams.Stream()
        side.wait_stream(main)
        with streams.stream(side):
            out.fill_(1.0)
            ready.record()
            events.append(side.record_event())
    for one in events if repaired else [ready]:
        main.wait_event(one)
    return outs[0] + outs[1]


def reuse(repaired: bool) -> torch.Tensor:
    """3.3c: a batch's memory is given away while the main stream reads it."""
    main, loading = streams.current_stream(), streams.Stream()
    hosts = [torch.full((SIZE,), float(i), device="cpu").pin_memory() for i in range(3)]
    totals = []
    for host in hosts:
        with streams.stream(loading):
            batch = host.to(streams.device(), non_blocking=True)
        main.wait_stream(loading)
        if repaired:
            batch.record_stream(main)
        totals.append(batch.sum())
        del batch
    return torch.stack(totals)


def flat(repaired: bool) -> torch.Tensor:
    """3.3a: a buffer is filled on one stream and sent from another."""
    main, packing = streams.current_stream(), streams.Stream()
    grads = [torch.ones(SIZE // 2, device=streams.device()) for _ in range(2)]
    buffer = torch.zeros(SIZE, device=streams.device())
    packing.wait_stream(main)
    with streams.stream(packing):
        torch.cat(grads, out=buffer)
    if repaired:
        main.wait_stream(packing)
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    work.wait()
    return buffer * 1.0


def no_wait(repaired: bool) -> torch.Tensor:
    """A sum is read before anybody waited for its collective."""
    buffer = torch.ones(SIZE, device=streams.device())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    if repaired:
        work.wait()
    read = buffer * 1.0
    work.wait()
    return read


PROGRAMS: Mapping[str, Callable[[bool], torch.Tensor]] = {
    "event": event,
    "reuse": reuse,
    "flat": flat,
    "no_wait": no_wait,
}


def run_all(repaired: bool) -> None:
    """Run each on one GPU and print what is reported of it, under its name.

    Collectives of one rank are enough to see whether a sanitizer knows on which stream
    NCCL works.
    """
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    for name, program in PROGRAMS.items():
        print("#### " + name, flush=True)
        try:
            program(repaired)
            torch.cuda.synchronize()
            print("no report", flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        torch.cuda.synchronize()
    dist.destroy_process_group()
