"""Twenty AdamW steps end where DDP's end, on every model fixture."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlaplab.models import TOY_NETS, Transformer, TransformerConfig
from overlaplab.techniques.data_parallel import BucketedReducer
from tests.ranks import values_of

NUM_STEPS = 20
TRANSFORMERS = {
    "transformer": TransformerConfig(
        num_layers=1, d_model=8, num_heads=2, vocab_size=16, max_tokens=8
    ),
    "llama": TransformerConfig(
        num_layers=1,
        d_model=8,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=16,
        max_tokens=8,
        tied=True,
        gated=True,
    ),
}
FIXTURES = (*TOY_NETS, *TRANSFORMERS)
UNUSED = ("unused", "uneven", "alternating", "zero_element")  # DDP must be told


def make_model(name: str) -> nn.Module:
    torch.manual_seed(7 + dist.get_rank())  # ranks differ until the broadcast
    if name in TRANSFORMERS:
        # Its key biases have no gradient but rounding, which AdamW makes large: not so
        # in float64, where rounding stays below its eps.
        return Transformer(TRANSFORMERS[name]).double()
    return TOY_NETS[name].make_model()


def loss_of(model: nn.Module, name: str, step: int) -> Tensor:
    rank = dist.get_rank()
    if name in TRANSFORMERS:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(16, (2, 7), generator=generator)
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    else:
        loss = model(TOY_NETS[name].make_batch(rank, step))
    return loss


def train(name: str, ddp: bool) -> list[Tensor]:
    """This rank's parameters after the steps."""
    model = trained = make_model(name)
    reducer = None
    if ddp:
        # No buffer is broadcast in a forward: a second one would spoil the first (A14).
        trained = DistributedDataParallel(
            model, find_unused_parameters=name in UNUSED, broadcast_buffers=False
        )
    else:
        reducer = BucketedReducer(model, bucket_mib=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for step in range(NUM_STEPS):
        loss_of(trained, name, step).backward()
        if reducer is not None:
            reducer.wait()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def train_all(ddp: bool) -> dict[str, list[Tensor]]:
    return {name: train(name, ddp) for name in FIXTURES}


@cache
def run_of(cluster: str, ranks: int, ddp: bool = False) -> tuple[Any, ...]:
    return values_of(train_all, ddp, cluster=cluster, world_size=ranks)


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_twenty_adamw_steps_end_where_those_of_ddp_end(
    cluster: str, ranks: int, name: str
) -> None:
    first, *others = (values[name] for values in run_of(cluster, ranks))
    for other in others:
        assert all(map(torch.equal, first, other))
    theirs = run_of("gloo", ranks, ddp=True)[0][name]
    for mine, its in zip(first, theirs, strict=True):
        if ranks == 2:  # halves are exact, before or after the sum
            assert torch.equal(mine, its)
        else:  # DDP divides first; bfloat16 keeps 8 bits
            tolerance = 2e-2 if name == "mixed_dtypes" else 1e-5
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)
