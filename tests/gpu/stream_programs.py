"""Programs about streams and waits that run unchanged on GPUs and on `virtual`.

On a GPU a delay kernel makes every race visible; on `virtual` a race is a finding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams

LONG = 400_000_000  # cycles: some 200 ms, long against any launch
NUM = 4 * 1024 * 1024  # elements: 16 MiB


def delay() -> None:
    """Keep the current stream busy for long."""
    if streams.device().type == "cuda":
        torch.cuda._sleep(LONG)


def late_sender() -> Tensor:
    """Ones on rank 0, twos on rank 1, whose stream is busy: its part comes late."""
    device = streams.device()
    dist.all_reduce(torch.zeros(1, device=device))  # sets the communicator up
    x = torch.full((NUM,), dist.get_rank() + 1.0, device=device)
    streams.synchronize()
    if dist.get_rank() == 1:
        delay()
    return x


def read_after_launch(wait: bool) -> float:
    """Reads the result of a collective, with or without waiting for it. Right: 6."""
    x = late_sender()
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    y = x * 2
    if not wait:
        work.wait()
    return float(y[-1].item())


def divide_after_launch(wait: bool) -> float:
    """B04: divides the sum in place, with or without waiting for it. Right: 1.5.

    Without the wait rank 0 divides before the sum, rank 1 after it: where both did
    the same, the result would be right by luck.
    """
    x = late_sender()
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    if dist.get_rank() == 1:
        delay()
    x /= 2
    if not wait:
        work.wait()
    streams.synchronize()
    return float(x[-1].item())


def wait_on_another_stream(joined: bool) -> float:
    """Waits on a side stream, reads on the default one. Right: 6.

    Args:
        joined: the default stream waits for the side stream before it reads.
    """
    x = late_sender()
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    work = dist.all_reduce(x, async_op=True)
    with streams.stream(side):
        work.wait()
        seen = x[:1] + 0
    if joined:
        streams.current_stream().wait_stream(side)
    y = x * 2
    streams.current_stream().wait_stream(side)
    del seen
    return float(y[-1].item())


def synchronize_the_wrong_stream(wait: bool) -> float:
    """Errata 44: a collective with async_op runs on NCCL's stream. Right: 3."""
    x = late_sender()
    comm = streams.Stream()
    comm.wait_stream(streams.current_stream())
    with streams.stream(comm):
        work = dist.all_reduce(x, async_op=True)
        if wait:
            work.wait()
    comm.synchronize()
    value = float(x[-1].item())
    work.wait()
    return value


def read_across_streams(wait: bool) -> float:
    """A kernel on one stream reads what one on another writes. Right: 4."""
    x = torch.zeros(NUM, device=streams.device())
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        delay()
        x.fill_(3.0)
    if wait:
        streams.current_stream().wait_stream(side)
    y = x + 1
    streams.synchronize()
    return float(y[-1].item())


def overwrite_across_streams(wait: bool) -> float:
    """A kernel overwrites what one on another stream has still to read. Right: 1."""
    x = torch.ones(NUM, device=streams.device())
    y = torch.zeros(NUM, device=streams.device())
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        delay()
        y.copy_(x)
    if wait:
        streams.current_stream().wait_stream(side)
    x.fill_(5.0)
    streams.synchronize()
    return float(y[-1].item())


def event_recorded_too_early(late: bool) -> float:
    """The event must be recorded after what it stands for. Right: 4."""
    x = torch.zeros(NUM, device=streams.device())
    side, event = streams.Stream(), streams.Event()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        if not late:
            event.record()
        delay()
        x.fill_(3.0)
        if late:
            event.record()
    streams.current_stream().wait_event(event)
    y = x + 1
    streams.synchronize()
    return float(y[-1].item())


def read_behind_a_tensor_hook(joined: bool) -> float:
    """U7: a hook enters a stream, the read behind the backward pass waits for it or
    not. Right: 3."""
    return _read_behind_a_hook(torch.Tensor.register_hook, joined)


def read_behind_a_post_accumulate_hook(joined: bool) -> float:
    """As above, in a hook that comes after the accumulation. Right: 3."""
    return _read_behind_a_hook(torch.Tensor.register_post_accumulate_grad_hook, joined)


def read_behind_a_callback(joined: bool) -> float:
    """As above, in a callback at the end of the backward pass. Right: 3."""
    engine = torch.autograd.Variable._execution_engine

    def register(x: Tensor, hook: Callable[[object], None]) -> None:
        x.register_hook(lambda grad: engine.queue_callback(lambda: hook(grad)))

    return _read_behind_a_hook(register, joined)


def _read_behind_a_hook(
    register: Callable[[Tensor, Callable[[object], None]], object], joined: bool
) -> float:
    device, side = streams.device(), streams.Stream()
    buffer = torch.zeros(NUM, device=device)
    x = torch.ones(NUM, device=device, requires_grad=True)

    def hook(_: object) -> None:
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            delay()
            buffer.fill_(3.0)

    register(x, hook)
    (x * 2).sum().backward()
    if joined:
        streams.current_stream().wait_stream(side)
    y = buffer * 1
    streams.synchronize()
    return float(y[-1].item())


def read_behind_a_backward_of_two_streams(one_stream: bool) -> float:
    """The caller waits for the streams of nodes: for what a hook launches on its own
    node's stream. Right: 3.

    Args:
        one_stream: the hook stays there, and enters no other.
    """
    device, side, other = streams.device(), streams.Stream(), streams.Stream()
    buffer = torch.zeros(NUM, device=device)
    x = torch.ones(NUM, device=device, requires_grad=True)
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        loss = (x * 2).sum()
    streams.current_stream().wait_stream(side)

    def hook(_: object) -> None:
        own = streams.current_stream()
        other.wait_stream(own)
        with streams.stream(own if one_stream else other):
            delay()
            buffer.fill_(3.0)

    x.register_post_accumulate_grad_hook(hook)
    loss.backward()
    y = buffer * 1
    streams.synchronize()
    return float(y[-1].item())


def dropped_under_a_side_stream(keep: str) -> tuple[float, bool]:
    """B01: allocated on one stream, reduced by NCCL, waited for and dropped on another.

    Args:
        keep: "" (nothing keeps the block), "record_stream", or "wait" (the stream that
            owns the block waits for the side stream before it allocates again).

    Returns:
        The mean as the side stream saw it (right: 3), and whether the next allocation
        got the same block.
    """
    x = late_sender()
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        seen = torch.empty_like(x)
        seen.copy_(x)
        if keep == "record_stream":
            x.record_stream(side)
        block = x.data_ptr()
        del x, work
    if keep == "wait":
        streams.current_stream().wait_stream(side)
    other = torch.full((NUM,), float("nan"), device=streams.device())
    same = other.data_ptr() == block
    streams.synchronize()
    return float(seen.mean().item()), same


def streams_of_messages() -> dict[str, bool]:
    """Whether a blocking and an asynchronous message are on a stream that computes."""
    import overlaplab as ol

    x = torch.ones(1024, 1024, device=streams.device())
    dist.all_reduce(x)  # sets the communicator up
    streams.synchronize()
    with ol.profile() as profile:
        y = x @ x
        dist.all_reduce(x)
        dist.all_reduce(y, async_op=True).wait()
        streams.synchronize()
    own = [s for s in profile.timeline.spans if s.rank == dist.get_rank()]
    computing = {s.attributes["stream"] for s in own if s.kind == "compute"}
    blocking, asynchronous = (s for s in own if s.kind == "communication")
    return {
        "blocking": blocking.attributes["stream"] in computing,
        "async_op": asynchronous.attributes["stream"] in computing,
    }


# Right value, and the argument with which the program is right.
PAIRS = {
    "read_after_launch": (read_after_launch, 6.0),
    "divide_after_launch": (divide_after_launch, 1.5),
    "wait_on_another_stream": (wait_on_another_stream, 6.0),
    "synchronize_the_wrong_stream": (synchronize_the_wrong_stream, 3.0),
    "read_across_streams": (read_across_streams, 4.0),
    "overwrite_across_streams": (overwrite_across_streams, 1.0),
    "event_recorded_too_early": (event_recorded_too_early, 4.0),
    "read_behind_a_tensor_hook": (read_behind_a_tensor_hook, 3.0),
    "read_behind_a_post_accumulate_hook": (read_behind_a_post_accumulate_hook, 3.0),
    "read_behind_a_callback": (read_behind_a_callback, 3.0),
    "read_behind_a_backward_of_two_streams": (
        read_behind_a_backward_of_two_streams,
        3.0,
    ),
}


KEEPS = ("", "record_stream", "wait")


def run_pairs() -> dict[str, tuple[float, float]]:
    """Of each pair what it gives with the wait, and without."""
    return {name: (fn(True), fn(False)) for name, (fn, _) in PAIRS.items()}


def run_keeps() -> dict[str, tuple[float, bool]]:
    found = {}
    for keep in KEEPS:
        torch.cuda.empty_cache()  # no other block of this size is free
        found[keep] = dropped_under_a_side_stream(keep)
    return found
