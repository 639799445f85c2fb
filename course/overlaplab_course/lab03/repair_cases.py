"""What the broken programs of 3.3 work on: layers, towers and batches, by number.

Knows no grader; `repair` runs programs on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab_course.lab03.play import WIDTH, compute

Results = Callable[[], dict[str, torch.Tensor]]


class Layer:
    """A layer of 3.3a.

    `grads` holds one or two gradients, `flat` what is sent. With one gradient, `flat`
    is that gradient. All are on the device.
    """

    def __init__(self, number: int, num_grads: int, start: torch.Tensor) -> None:
        device = streams.device()
        rows = 2 * WIDTH
        self.number = number
        self.grads = [torch.zeros(rows, WIDTH, device=device) for _ in range(num_grads)]
        self.flat = self.grads[0]
        if num_grads > 1:
            self.flat = torch.zeros(rows * num_grads, WIDTH, device=device)
        for grad, letter in zip(self.grads, "ab", strict=False):
            streams.name_tensor(grad, f"grad {number}{letter}")
        streams.name_tensor(self.flat, f"flat {number}")
        self._start = start

    def backward(self) -> None:
        """Compute the gradients: 4 ms on the current stream."""
        with streams.annotate(f"back {self.number}"):
            units = 4 // len(self.grads)
            for grad in self.grads:
                compute([self._start], grad[:WIDTH], units)
                grad[WIDTH:].copy_(grad[:WIDTH])

    def pack(self) -> None:
        """Copy the gradients into `flat`: 1 ms on the current stream."""
        with streams.annotate(f"pack {self.number}"):
            torch.cat(self.grads, out=self.flat)
            compute([self.flat[:WIDTH]], self.flat[:WIDTH], 1)


class Tower:
    """A tower of 3.3c: rows of a table in the host's memory, and a layer."""

    def __init__(self, letter: str, fetch_ms: int, forward_ms: int) -> None:
        device = streams.device()
        self.letter = letter
        shape = (WIDTH * fetch_ms, WIDTH)
        values = torch.full(shape, 0.1 + 0.1 * ord(letter) % 7, device="cpu")
        self._host = values.pin_memory()
        self.rows = torch.zeros(shape, device=device)
        self.out = torch.zeros(WIDTH, WIDTH, device=device)
        streams.name_tensor(self.rows, f"rows {letter}")
        streams.name_tensor(self.out, f"out {letter}")
        self._units = forward_ms

    def fetch(self) -> None:
        """Copy its rows to the device, on the current stream."""
        with streams.annotate(f"fetch {self.letter}"):
            self.rows.copy_(self._host, non_blocking=True)

    def forward(self) -> None:
        """Compute `out` from the rows, on the current stream."""
        with streams.annotate(f"tower {self.letter}"):
            compute([self.rows[:WIDTH]], self.out, self._units)


# -- 3.3a: a flat buffer is filled on one stream and sent from another


def _num_grads(number: int) -> list[int]:
    """Of each layer, in the order of the backward pass; the first has one."""
    draw = random.Random(11 * int(number) + 3)
    rest = [1, 2, 2, draw.choice((1, 2))]
    draw.shuffle(rest)
    return [1, *rest]


def layers(number: int) -> Any:
    counts = _num_grads(number)
    seed = torch.Generator().manual_seed(dist.get_rank())
    start = torch.randn(WIDTH, WIDTH, generator=seed)
    layers = [Layer(len(counts) - i, n, start) for i, n in enumerate(counts)]
    return (layers,), lambda: {f"flat {x.number}": x.flat for x in layers}


def flat_truth(number: int) -> Mapping[str, object]:
    counts = _num_grads(number)
    first = len(counts) - counts.index(2)
    return {"kind": "race", "tensor": f"flat {first}", "packed_on": "stream 1"}


# -- 3.3b: one event for several streams; one rank has several


def _tower_letters(number: int) -> tuple[list[str], list[str]]:
    """Of rank 0 and rank 1: two towers on one of them, one on the other."""
    draw = random.Random(13 * int(number) + 5)
    letters = draw.sample("PQRSTUVW", 3)
    both = [letters[:2], letters[2:]]
    if draw.random() < 0.5:
        both.reverse()
    return both[0], both[1]


def towers(number: int) -> Any:
    letters = _tower_letters(number)[dist.get_rank()]
    draw = random.Random(17 * int(number))
    # The first tower ends last: who waits for the second only, goes on too early.
    sizes = [(draw.choice((3, 4)), draw.choice((5, 6))), (2, 1)]
    towers = [Tower(x, *size) for x, size in zip(letters, sizes, strict=False)]

    def combine() -> dict[str, torch.Tensor]:
        made = {x.letter: torch.zeros_like(x.out) for x in towers}
        with streams.annotate("combine"):
            for tower in towers:
                compute([tower.out], made[tower.letter], 1)
        return made

    return (towers,), combine


def event_truth(number: int) -> Mapping[str, object]:
    letters = _tower_letters(number)
    rank = 0 if len(letters[0]) == 2 else 1
    return {"kind": "race", "rank": rank, "tensor": f"out {letters[rank][0]}"}


# -- 3.3c: a batch's memory is given away while another stream still reads it


def _batch_ms(number: int) -> list[int]:
    """How long each batch takes to copy: two sizes, three of each."""
    draw = random.Random(19 * int(number) + 2)
    sizes = [2, 2, 2, 3, 3, 3]
    draw.shuffle(sizes)
    return sizes


def batches(number: int) -> Any:
    sizes = _batch_ms(number)
    hosts = []
    for i, ms in enumerate(sizes, start=1):
        host = torch.full((WIDTH * ms, WIDTH), float(i), device="cpu").pin_memory()
        hosts.append(host)
    seen: dict[str, torch.Tensor] = {}

    def step(batch: torch.Tensor) -> None:
        index = len(seen) + 1
        streams.name_tensor(batch, f"batch {index}")
        out = torch.zeros(WIDTH, WIDTH, device=streams.device())
        seen[f"step {index}"] = out
        with streams.annotate(f"step {index}"):
            compute([batch[:WIDTH]], out, 4)

    return (hosts, step), lambda: dict(seen)
