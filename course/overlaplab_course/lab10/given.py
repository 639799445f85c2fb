"""What lab 10 gives: a stack of sharded layers, a board with round numbers, a step.

A layer is a `Unit`: its weights are gathered together. A step runs the learner's parts
and the course's own around them; values are real, times come from the board.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.grading import origins
from overlaplab.grading.forms import Examined
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware, Link, find_hardware

NUM_RANKS = 4
NUM_LAYERS = 24
WIDTH, ROWS = 48, 64
Shapes = Sequence[tuple[int, ...]]
# From the units in the order of their use, to their gathered weights in that order.
Weights = Callable[..., Iterable[Tensor]]

# A layer's matmul takes 8 ms, its gather over four ranks 2 ms, a launch 0.02 ms.
_GATHERED_BYTES = 4 * WIDTH * (WIDTH + 1)
BOARD: Hardware = replace(
    find_hardware("chalk"),
    name="board",
    flops_per_s={"default": 2 * ROWS * WIDTH * WIDTH * 1000 // 8},
    memory_bytes_per_s=10**15,
    kernel_floor_ns=0,
    launch_ns=20_000,
    collective_launch_ns=40_000,
    link=Link(
        latency_ns=200_000,
        bytes_per_s=_GATHERED_BYTES * 3 // 4 * 10**4 // 18,
        source="round numbers: a layer of this lab in 2 ms over four ranks",
    ),
    source="no machine: 8 ms for a layer's matmul, 2 ms for its gather",
)


def numel_of(shapes: Shapes) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in shapes)


def split(weights: Sequence[Tensor], num_ranks: int) -> list[Tensor]:
    """Every rank's shard of `weights`: flat, equal sizes, zeros behind the last."""
    flat = torch.cat([weight.reshape(-1) for weight in weights])
    size = -(-flat.numel() // num_ranks)
    padded = flat.new_zeros(size * num_ranks)
    padded[: flat.numel()] = flat
    return [part.clone() for part in padded.view(num_ranks, size)]


def _views(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Unit:
    """A layer, tanh(x W + b), of which this rank has a shard.

    Args:
        name: "layer 3".
        shapes: of W, b and, in some layers, a table of which one row is added.
        shard: this rank's part of the weights, flat; as large on every rank.
        grad: this rank's part of their gradient, as `shard`; the step fills it.

    Attributes:
        numel: elements of the gathered weights, padding included: what a gather brings.
    """

    def __init__(self, name: str, shapes: Shapes, shard: Tensor, grad: Tensor) -> None:
        self.name, self.shapes, self.shard, self.grad = name, shapes, shard, grad
        self.numel = shard.numel() * dist.get_world_size()
        self._saved: tuple[Tensor, Tensor] | None = None
        streams.name_tensor(shard, f"shard of {name}")
        streams.name_tensor(grad, f"gradient shard of {name}")

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The layer's output; keeps what its backward needs.

        Args:
            x: (rows, width).
            weights: flat, gathered; at least `numel` elements.
        """
        matrix, bias, *table = _views(weights, self.shapes)
        with streams.annotate(f"forward {self.name}"):
            hidden = torch.addmm(bias, x, matrix)
            for rows in table:
                hidden += rows[0]
            y = hidden.tanh_()
        self._saved = x, y
        return y

    def backward(self, grad: Tensor, weights: Tensor, full_grad: Tensor) -> Tensor:
        """The gradient of the layer's input; forgets what the forward kept.

        Args:
            grad: of the output.
            weights: as in `forward`.
            full_grad: `numel` elements, flat: this rank's gradient of all weights is
                written here.
        """
        if self._saved is None:
            raise RuntimeError(f"backward of {self.name} without a forward before it")
        (x, y), self._saved = self._saved, None
        matrix, _, *_ = _views(weights, self.shapes)
        of_matrix, of_bias, *of_table = _views(full_grad, self.shapes)
        with streams.annotate(f"backward {self.name}"):
            inner = grad * (1 - y * y)
            torch.mm(x.t(), inner, out=of_matrix)
            torch.sum(inner, 0, out=of_bias)
            for rows in of_table:
                rows.zero_()
                rows[0].copy_(of_bias)
            full_grad[numel_of(self.shapes) :].zero_()
            return inner @ matrix.t()


def new_slots(units: Sequence[Unit], number: int) -> list[Tensor]:
    """`number` flat tensors, each with room for the largest of `units`."""
    largest = max(unit.numel for unit in units)
    return [units[0].shard.new_empty(largest) for _ in range(number)]


@dataclass(frozen=True)
class Stack:
    """Layers one behind the other, and what each rank computes with them.

    Args:
        num_layers: how many.
        width: of all of them.
        rows: of each rank's input.
        tables: rows of the table of layer i, 0: none; () for none at all. A table makes
            the gather longer and the matmul no longer.
        dtype: of everything.
    """

    num_layers: int = NUM_LAYERS
    width: int = WIDTH
    rows: int = ROWS
    tables: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def shapes(self, layer: int) -> list[tuple[int, ...]]:
        """Of the weights of one layer."""
        table = self.tables[layer] if self.tables else 0
        shapes: list[tuple[int, ...]] = [(self.width, self.width), (self.width,)]
        return [*shapes, (table, self.width)] if table else shapes

    def weights(self) -> list[list[Tensor]]:
        """Of every layer, whole: what one process would have."""
        draw = torch.Generator().manual_seed(10)
        return [
            [
                (torch.randn(shape, generator=draw) / shape[0] ** 0.5).to(self.dtype)
                for shape in self.shapes(layer)
            ]
            for layer in range(self.num_layers)
        ]

    def inputs(self, num_ranks: int) -> list[Tensor]:
        """Of each rank."""
        draws = (torch.Generator().manual_seed(50 + rank) for rank in range(num_ranks))
        return [
            torch.randn(self.rows, self.width, generator=draw).to(self.dtype)
            for draw in draws
        ]

    def slot_bytes(self, num_ranks: int) -> int:
        """Of the largest layer, gathered."""
        numels = (numel_of(self.shapes(layer)) for layer in range(self.num_layers))
        return -(-max(numels) // num_ranks) * num_ranks * self.dtype.itemsize

    def right(self, num_ranks: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        """What one process computes: each rank's output, and each layer's gradients,
        the mean over the ranks of those of half the sum of squares."""
        leaves = [[w.requires_grad_() for w in layer] for layer in self.weights()]
        outputs = []
        for x in self.inputs(num_ranks):
            for matrix, bias, *table in leaves:
                x = torch.tanh(x @ matrix + bias + sum(rows[0] for rows in table))
            outputs.append(x)
            (x.square().sum() / 2 / num_ranks).backward()  # type: ignore[no-untyped-call]
        none = torch.zeros(())
        grads = [[none if w.grad is None else w.grad for w in lay] for lay in leaves]
        return [y.detach() for y in outputs], grads


EQUAL = Stack()
SMALL = Stack(num_layers=6)
THREE = Stack(num_layers=3)
# Two layers have a table: their gather takes six times as long.
UNEVEN = Stack(num_layers=8, tables=(0, 0, 0, 300, 0, 0, 300, 0))


class _Held(torch.nn.Module):
    """Lets the record know that these tensors are parameters: of kind "shards"."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        super().__init__()
        every = (torch.nn.Parameter(shard, requires_grad=False) for shard in shards)
        self.shards = torch.nn.ParameterList(every)

    def forward(self) -> None:
        """Nothing: a call is when a module's parameters become known."""


Forward = Callable[[Tensor, Sequence[Unit], Iterator[Tensor]], Tensor]
Backward = Callable[[Tensor, Sequence[Unit], Iterator[Tensor]], Any]


class Played(Examined):
    """A step that was run; `values` has (output, [gradient shard of each layer])."""


def play_step(
    stack: Stack,
    weights: Weights,
    args: tuple[Any, ...],
    forward: Forward,
    backward: Backward | None,
    *,
    num_ranks: int = NUM_RANKS,
    hardware: Hardware = BOARD,
) -> Played:
    """Run one step of `stack` on the virtual cluster; without `backward`, its forward.

    `weights(units, *args)` is called once on each rank, with the units in the order of
    their use. Shards and inputs are there before: making them is not recorded.
    """
    shards = [split(layer, num_ranks) for layer in stack.weights()]
    grads = [[torch.zeros_like(part) for part in layer] for layer in shards]
    arguments = (stack, shards, grads, stack.inputs(num_ranks), weights, args)
    recorded = run(
        step_on_rank,
        *arguments,
        forward,
        backward,
        world_size=num_ranks,
        hardware=hardware,
        timeout_s=30,
    )
    return Played(origins.release(recorded))


def step_on_rank(
    stack: Stack,
    shards: list[list[Tensor]],
    grads: list[list[Tensor]],
    inputs: list[Tensor],
    weights: Weights,
    args: tuple[Any, ...],
    forward: Forward,
    backward: Backward | None,
) -> origins.Held:
    """The step of one rank of any cluster; holds (output, [gradient shard]).

    Args:
        shards, grads: `[layer][rank]`; the step writes the second.
        inputs: by rank.
    """
    rank = dist.get_rank()
    units = [
        Unit(f"layer {i}", stack.shapes(i), shards[i][rank], grads[i][rank])
        for i in range(stack.num_layers)
    ]
    _Held([unit.shard for unit in units])()
    x = inputs[rank]
    notes = origins.given([x, *(unit.shard for unit in units)])
    back = units[::-1] if backward else []
    slots = iter(weights([*units, *back], *args))
    y = forward(x, units, slots)
    if backward:
        backward(y, back, slots)
    found = [unit.grad for unit in units] if backward else []
    return origins.Held((y, found), (*notes, *origins.returned([y, *found])))
