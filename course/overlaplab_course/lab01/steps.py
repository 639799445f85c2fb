"""The training steps that lab 01 runs, and the slow GPUs that it runs them on.

Ten linear layers in slow motion: every time is a whole number of milliseconds, so that
a step can be worked out in the head. The written steps cost no run and say the same (a
test holds them to the recorded one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from overlaplab.cluster.run import run
from overlaplab.hardware import Hardware, Link, find_hardware, with_link
from overlaplab.program import Program, ProgramBuilder, resolve
from overlaplab.timeline import Timeline

NUM_LAYERS = 10
ROWS, WIDTH = 128, 96
GRADIENT_BYTES = 4 * WIDTH * WIDTH  # of one layer
_BACKWARD_FLOPS = 4 * ROWS * WIDTH * WIDTH  # of one layer: two products
_UPDATE_BYTES = 12 * WIDTH * WIDTH  # two tensors read, one written
NS_PER_MS = 1_000_000

# Nothing but the bytes costs time: for written steps, two ranks, ten bytes a ns.
CHALK = replace(with_link("chalk", latency_ns=0), name="chalk")
_BYTES_PER_NS = 10


def slow_gpu(
    layer_ms: float, message_ms: float, *, update_ms: float = 1, latency_us: float = 0
) -> Hardware:
    """A GPU on which one layer's backward pass and one layer's message take so long.

    Its forward pass takes half as long as the backward pass. Launches are free, and
    nothing slows anything else.
    """
    return replace(
        find_hardware("chalk"),
        name="chalk in slow motion",
        flops_per_s={"default": round(1000 * _BACKWARD_FLOPS / layer_ms)},
        memory_bytes_per_s=10**15,
        points={"bytes:add_": ((_UPDATE_BYTES, round(update_ms * NS_PER_MS)),)},
        link=Link(
            latency_ns=round(1000 * latency_us),
            bytes_per_s=round(1000 * GRADIENT_BYTES / message_ms),
            source="round numbers, between two ranks",
        ),
    )


GPU = slow_gpu(6, 5)


def ten_layers() -> tuple[nn.Module, Tensor, Optimizer]:
    """Model, batch and optimizer of the opening step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        )
        # As if an embedding stood before it: each layer's backward pass is alike.
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return model, x, SGD(model.parameters(), lr=0.1)


def _backward_only(model: nn.Module, x: Tensor) -> None:
    works = []

    def send(param: Tensor) -> None:
        works.append(dist.all_reduce(param.grad, async_op=True))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
    model(x).sum().backward()
    for work in works:
        assert work is not None
        work.wait()


@lru_cache(maxsize=1)
def recorded() -> Program:
    """Forward and backward pass on two ranks, a message a layer; without update."""
    model, x, _ = ten_layers()
    program = run(_backward_only, model, x, world_size=2, hardware=GPU).program
    assert program is not None
    return program


def from_backward(timeline: Timeline) -> Timeline:
    """Rank 0 from the start of the backward pass on."""
    starts = (s.start_ns for s in timeline.spans if s.attributes.get("phase"))
    spans = [s for s in timeline.spans if s.attributes.get("phase") == "backward"]
    first_ns = min((s.start_ns for s in spans), default=min(starts, default=0))
    return timeline.where(lambda s: s.rank == 0 and s.start_ns >= first_ns)


def write_step(
    layers_ns: Sequence[int],
    messages_ns: Sequence[int],
    *,
    per_bucket: int = 1,
    forward_ns: int = 0,
    forward_pieces: int = 1,
    update_ns: int = 0,
) -> Program:
    """A step of two ranks, one of them written, for `CHALK`.

    Args:
        layers_ns: the backward pass of each layer, in its order (the last layer first).
        messages_ns: what sending the gradients of each takes.
        per_bucket: layers that share a message; as many as there are: nothing overlaps.
        forward_ns, update_ns: before the backward pass, and after all messages.
        forward_pieces: launches of the forward pass.
    """
    builder = ProgramBuilder(num_ranks=1, represents=2)
    if forward_ns:
        for _ in range(forward_pieces):
            builder.compute(
                0, "forward", ns=forward_ns // forward_pieces, phase="forward"
            )
    number = len(layers_ns)
    works, bucket_ns = [], 0
    for place, (layer_ns, message_ns) in enumerate(
        zip(layers_ns, messages_ns, strict=True)
    ):
        name = f"layer {number - place}"
        builder.compute(0, name, ns=layer_ns, phase="backward")
        bucket_ns += message_ns
        in_bucket = place % per_bucket + 1
        if in_bucket > 1:
            name = f"layers {number - place + in_bucket - 1} to {number - place}"
        if in_bucket == number:
            name = "all layers"
        if (place + 1) % per_bucket == 0 or place + 1 == number:
            works.append(
                builder.collective(
                    0, "all_reduce", bytes=bucket_ns * _BYTES_PER_NS, label=name
                )
            )
            bucket_ns = 0
    for work in works:
        builder.wait(0, work)
    if update_ns:
        builder.compute(0, "update", ns=update_ns)
    return builder.build()


def write_pair(tc_ns: int, tm_ns: int, *, at_once: bool) -> Program:
    """Computation and communication that need nothing of one another."""
    builder = ProgramBuilder(num_ranks=1, represents=2)
    size = tm_ns * _BYTES_PER_NS
    if tc_ns:
        builder.compute(0, "compute", ns=tc_ns)
    if size:  # launched from a stream that holds nothing, it waits for nothing
        stream = "side" if at_once else "default"
        builder.collective(0, "all_reduce", bytes=size, stream=stream)
    return builder.build()


def pair_timeline(tc_ns: int, tm_ns: int, *, at_once: bool) -> Timeline:
    """`write_pair`, resolved."""
    return resolve(write_pair(tc_ns, tm_ns, at_once=at_once), CHALK)
