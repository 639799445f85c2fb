"""The course's own solutions of lab 04, behind which a learner's parts run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams

Weights = dict[str, torch.Tensor]


def two_sums(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Each wait stands right before the first use of its sum."""
    a = x @ w["a"]
    sum_a = dist.all_reduce(a, async_op=True)
    b = x @ w["b"]
    sum_b = dist.all_reduce(b, async_op=True)
    c = x @ w["c"]
    sum_a.wait()
    y = a @ w["d"]
    sum_b.wait()
    z = b @ w["e"]
    return y + z + c


def experts(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """First what the longest chain waits for; the free work while messages travel."""
    routed = x @ w["routed_in"]
    sum_routed = dist.all_reduce(routed, async_op=True)
    gate = x @ w["gate"]
    sum_gate = dist.all_reduce(gate, async_op=True)
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    sum_routed.wait()
    y = routed @ w["routed_out"]
    sum_gate.wait()
    return (y + shared) * gate


def average_gradients(layers: Sequence[Any], k: int) -> list[torch.Tensor]:
    """Copies, messages, waits and write-backs on a stream of their own."""
    from overlaplab_course.lab04.window import backward

    num_ranks = dist.get_world_size()
    compute, side = streams.current_stream(), streams.Stream()
    grads: list[torch.Tensor] = []
    in_flight: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def send(grad: torch.Tensor) -> None:
        message = grad.float()
        work = dist.all_reduce(message, async_op=True)
        in_flight.append((grad, message, work))

    def finish_oldest() -> None:
        grad, message, work = in_flight.pop(0)
        work.wait()  # the side stream waits; the backward pass goes on
        grad.copy_(message / num_ranks)

    for layer in layers:
        grads.append(backward(layer))
        side.wait_stream(compute)  # the copy reads the gradient
        with streams.stream(side):
            if len(in_flight) == k:
                finish_oldest()
            send(grads[-1])
    with streams.stream(side):
        while in_flight:
            finish_oldest()
    compute.wait_stream(side)  # who uses the gradients waits for the write-backs
    return grads


def stalling(layers: Sequence[Any], k: int) -> list[torch.Tensor]:
    """The limit of exercise 4.4 before its repair: the current stream waits."""
    from overlaplab_course.lab04.window import backward

    grads: list[torch.Tensor] = []
    in_flight: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def send(grad: torch.Tensor) -> None:
        message = grad.float()
        work = dist.all_reduce(message, async_op=True)
        in_flight.append((grad, message, work))

    def finish_oldest() -> None:
        grad, message, work = in_flight.pop(0)
        work.wait()
        grad.copy_(message / dist.get_world_size())

    for layer in layers:
        grads.append(backward(layer))
        if len(in_flight) == k:
            finish_oldest()
        send(grads[-1])
    while in_flight:
        finish_oldest()
    return grads
