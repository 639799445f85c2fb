"""What torch.compile compiled trains under Zero3 as it does without a compiler."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.models.toy_nets import WIDTH, random_batch
from tests.ranks import values_of

NUM_BLOCKS, NUM_STEPS = 2, 3
WAYS = (
    "blocks, before",
    "blocks, after",
    "blocks, wrapped",
    "the model, in place",
    "the model, wrapped",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


def train(way: str | None) -> tuple[list[Tensor], int]:
    """Full values after the steps, and how many graphs were compiled."""
    import torch._dynamo  # seconds; only here
    from torch._dynamo.backends.registry import lookup_backend

    graphs = 0

    def backend(*args: Any, **settings: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(*args, **settings)

    torch._dynamo.reset()
    torch.manual_seed(1 + dist.get_rank())
    blocks: list[Any] = [Block() for _ in range(NUM_BLOCKS)]
    if way == "blocks, wrapped":
        blocks = [torch.compile(block, backend=backend) for block in blocks]
    if way == "blocks, before":
        for block in blocks:
            block.compile(backend=backend)
    forward: Any
    forward = model = nn.Sequential(*blocks)
    zero = ol.Zero3(model)
    if way == "blocks, after":
        for block in blocks:
            block.compile(backend=backend)
    if way == "the model, in place":
        model.compile(backend=backend)
    if way == "the model, wrapped":
        forward = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(zero.shards(), lr=0.05)
    for step in range(NUM_STEPS):
        forward(random_batch(dist.get_rank(), step, WIDTH)).square().mean().backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
    return list(zero.full_state_dict().values()), graphs


def train_all() -> dict[str | None, tuple[list[Tensor], int]]:
    return {way: train(way) for way in (None, *WAYS)}


@cache
def of_all() -> tuple[dict[str | None, tuple[list[Tensor], int]], ...]:
    return values_of(train_all, cluster="gloo")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_trains_as_it_does_without_a_compiler(way: str) -> None:
    for found in of_all():
        (values, graphs), (expected, none) = found[way], found[None]
        assert graphs == NUM_BLOCKS and none == 0
        for got, want in zip(values, expected, strict=True):
            # A compiler may round a sum in another order.
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
