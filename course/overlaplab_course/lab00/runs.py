"""What the cells of lab 00 run: a GPU in round numbers, and small training steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from overlaplab.cluster.run import run
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import Op
from overlaplab.timeline import Span, Timeline
from overlaplab_course.lab00.launches import LAUNCH_US

GPU: Hardware = replace(
    find_hardware("chalk"),
    name="chalk, 10 us a launch",
    launch_ns=LAUNCH_US * 1000,
    backward_launch_ns=None,
    collective_launch_ns=20_000,
    link=Link(latency_ns=20_000, bytes_per_s=10**10, source="round numbers"),
    source=(
        "no machine: round numbers for mental arithmetic. A launch costs 10 us, a "
        "collective's 20; 1000 FLOP or 1000 bytes of memory take 1 ns; a message takes "
        "20 us and 0.1 ns a byte"
    ),
)


def model_and_batch(number: int) -> tuple[nn.Module, Tensor]:
    """A few equal layers and a batch, of sizes that belong to a learner's number."""
    draw = random.Random(int(number))
    width = draw.choice((224, 256, 288))
    num_layers = draw.choice((4, 5, 6, 7))
    batch = draw.choice((768, 896, 1024))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(number) % 2**31)
        layers: list[nn.Module] = []
        for _ in range(num_layers):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers), torch.randn(batch, width)


def train_step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward pass: what exercise 0.2 counts."""
    loss = model(x).square().mean()
    loss.backward()


# The lines of the table of section 4, and what they do to the CPU.
LINES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss.item()": lambda x, loss: loss.item(),
    "print(loss)": lambda x, loss: f"{loss}",
    "x.shape[0]": lambda x, loss: x.shape[0],
    "if loss > 0:": lambda x, loss: bool(loss > 0),
    "loss.detach()": lambda x, loss: loss.detach(),
    "x.nonzero()": lambda x, loss: x.nonzero(),
    "x.cpu()": lambda x, loss: x.cpu(),
    "torch.maximum(loss, loss)": lambda x, loss: torch.maximum(loss, loss),
}


def holds_the_cpu(line: Callable[[Tensor, Tensor], Any]) -> bool:
    """Whether the CPU waits for the GPU in `line(x, loss)`, from a run of it."""

    def on_rank() -> None:
        x = torch.randn(64, 64) @ torch.randn(64, 64)
        line(x, x.square().mean())

    recorded = run(on_rank, world_size=1, hardware=GPU)
    assert recorded.program is not None
    return any(op.kind == "host_wait" for op in recorded.program.ranks[0])


def is_launch(span: Span) -> bool:
    return span.kind == "launch"


def is_on_gpu(span: Span) -> bool:
    """A kernel, a copy or a collective: not of the CPU's lane."""
    return span.kind not in ("launch", "host")


def last_launch_ns(timeline: Timeline) -> int:
    """When the CPU has launched everything."""
    return max(span.end_ns for span in timeline.spans if is_launch(span))


def device_idle_ns(timeline: Timeline) -> int:
    """How long the GPU has nothing to run between its first start and its last end."""
    spans = sorted((s.start_ns, s.end_ns) for s in timeline.spans if is_on_gpu(s))
    idle_ns, busy_until = 0, spans[0][0] if spans else 0
    for start_ns, end_ns in spans:
        idle_ns += max(0, start_ns - busy_until)
        busy_until = max(busy_until, end_ns)
    return idle_ns


def host_waits(ops: tuple[Op, ...]) -> list[Op]:
    """Where the CPU waits for the GPU, in program order."""
    return [op for op in ops if op.kind == "host_wait"]
