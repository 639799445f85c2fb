"""What must be right in other dtypes, on other groups and on other streams."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.models.toy_nets import WIDTH
from overlaplab.techniques.zero import Zero3
from tests.techniques.zero.misuse import batch
from tests.techniques.zero.programs import Blocks


def small_steps(number: int) -> tuple[list[str], float, float, float]:
    """SGD with steps that bfloat16 cannot see, on one weight of 1 with the input 1.

    Returns:
        Dtypes while it trains, and the weight: gathered, in full, after remove().
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    zero = Zero3(model, mixed_precision=torch.bfloat16)
    optimizer = torch.optim.SGD(zero.shards(), lr=2.0**-10)
    for _ in range(number):
        loss = model(torch.ones(1, 1, dtype=torch.bfloat16)).sum()
        loss.backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
    dtypes = [str(t.dtype) for t in (model.weight, *zero.shards(), loss)]
    full = zero.full_state_dict()["weight"].item()
    zero.remove()
    return dtypes, loss.item(), full, model.weight.item()


def averages_in_full() -> float:
    """Gradients 256 and 1 of two ranks: their bfloat16 sum is 256."""
    model = nn.Linear(1, 1, bias=False)
    zero = Zero3(model, mixed_precision=torch.bfloat16)
    x = torch.full((1, 1), (256.0, 1.0)[dist.get_rank()], dtype=torch.bfloat16)
    model(x).sum().backward()
    zero.wait()
    (piece,) = zero.shards()
    return float(piece.grad) if len(piece) and piece.grad is not None else 128.5


def in_a_subgroup() -> int:
    """Ranks 0 and 2 share a model; rank 1 has one by itself. A rank's elements."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    model = Blocks()
    zero = Zero3(model, process_group=groups[dist.get_rank() % 2])
    optimizer = torch.optim.AdamW(zero.shards())
    for step in range(2):
        model(batch(step)).backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
    return sum(len(piece) for piece in zero.shards())


class OnAStream(nn.Module):
    """A block that computes on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        here, side = streams.current_stream(), streams.Stream()
        side.wait_stream(here)
        with streams.stream(side):
            x = torch.tanh(self.linear(x))
        here.wait_stream(side)
        return x


def on_streams() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(*(OnAStream() for _ in range(4)))
    zero = Zero3(model)
    optimizer = torch.optim.SGD(zero.shards(), lr=0.5)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict()


def averages_of(dtype: torch.dtype) -> list[Any]:
    """Of two ranks whose inputs are 40000 and 20000 (and i times that)."""
    factor = 1j if dtype.is_complex else 1
    model = nn.Sequential(*(nn.Linear(1, 1, dtype=dtype) for _ in range(2)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    zero = Zero3(model)
    x = torch.full((1, 1), factor * (40000.0, 20000.0)[dist.get_rank()], dtype=dtype)
    out = model(x)
    out.backward(torch.ones_like(out))
    zero.wait()
    zero.clip_grad_norm_(float("inf"))
    return [p.grad.item() for p in zero.shards() if len(p) and p.grad is not None]
