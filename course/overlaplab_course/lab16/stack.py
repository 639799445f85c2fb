"""A deep stack of thin layers, run with real values on one virtual GPU: for 16.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.cluster.run import Run
from overlaplab.grading import origins
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.timeline import Timeline

Segmented = Callable[[Sequence[nn.Module], Tensor, int], Tensor]
# Small tensors take what large ones take on an H200: a layer's matmul 1 ms, and each
# pass over an activation a tenth.
ROWS, WIDTH = 1024, 16
_KINDS = ("inputs", "activations", "other")
SLOW: Hardware = replace(
    find_hardware("chalk"),
    name="chalk in slow motion",
    flops_per_s={"default": 2 * ROWS * WIDTH * WIDTH * 1000},
    memory_bytes_per_s=4 * ROWS * WIDTH * 20_000,
    kernel_floor_ns=0,
    launch_ns=0,
    collective_launch_ns=0,
    source="no machine: round numbers for the head",
)


class Layer(nn.Module):
    """tanh(x W); with dropout behind it, if there is any."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y if self.dropout is None else self.dropout(y)


@dataclass(frozen=True)
class Stack:
    """`num_layers` layers of one width, and an input of so many rows."""

    num_layers: int
    dropout: float = 0.0
    rows: int = ROWS

    def make(self) -> tuple[list[Layer], Tensor]:
        """Layers and an input: the same ones each time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(16)
            layers = [Layer(self.dropout) for _ in range(self.num_layers)]
            return layers, torch.randn(self.rows, WIDTH)


def play(stack: Stack, segmented: Segmented, k: int) -> Run:
    """Forward and backward of the stack; values are ([output, gradients], state).

    The state is that of the random generator when all is done.
    """
    layers, x = stack.make()
    options: dict[str, Any] = {"world_size": 1, "hardware": SLOW, "timeout_s": 60}
    return origins.release(run(_step, layers, x, segmented, k, **options))


def _step(layers: list[Layer], x: Tensor, segmented: Segmented, k: int) -> origins.Held:
    torch.manual_seed(5)
    notes = origins.given([x, *layers])
    with streams.annotate("forward"):
        y = segmented(layers, x, k)
    with streams.annotate("backward"):
        if y.requires_grad:  # else no weight gets a gradient, which is told as that
            y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    grads = [layer.linear.weight.grad for layer in layers]
    found = [y.detach(), *(g for g in grads if g is not None)]
    state = torch.get_rng_state()
    return origins.Held((found, state), (*notes, *origins.returned(found)))


def plain(layers: Sequence[nn.Module], x: Tensor, k: int) -> Tensor:
    """Without checkpoints."""
    for layer in layers:
        x = layer(x)
    return x


@lru_cache(maxsize=16)
def right(stack: Stack) -> Run:
    """The run without checkpoints."""
    return play(stack, plain, 1)


def num_forwards(played: Run) -> int:
    """How many layers' forwards were computed, again included."""
    assert played.program is not None
    return sum(op.name == "tanh" for op in played.program.ranks[0])


def activations(timeline: Timeline, stack: Stack) -> float:
    """The most that lives at once, in activations of one layer, weights left out."""
    (memory,) = timeline.memory
    chosen = [sizes for kind, sizes in memory.kinds if kind in _KINDS]
    return max(map(sum, zip(*chosen, strict=True))) / (4 * stack.rows * WIDTH)


def sweep(segmented: Segmented, num_layers: int, ks: Sequence[int]) -> dict[int, float]:
    """For each k the most activations that live, from the lane of memory."""
    stack = Stack(num_layers)
    return {k: activations(play(stack, segmented, k).timeline, stack) for k in ks}
