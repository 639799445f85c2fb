"""Steps of AdamW on sharded fixtures, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.models import TOY_NETS, Transformer, TransformerConfig
from overlaplab.techniques.zero import Zero3

STEPS = (3, 20)
# Rows of a vocabulary that no world size divides.
SIZES = {"num_layers": 3, "d_model": 8, "num_heads": 2, "vocab_size": 13}
TRANSFORMERS = {
    "transformer": TransformerConfig(**SIZES, max_tokens=8),
    "tied head": TransformerConfig(**SIZES, max_tokens=8, tied=True),
}
# Ranks choose between these nets' repeated layers: none may be a unit.
WHOLE = ("uneven", "alternating")
FIXTURES = (*TOY_NETS, *TRANSFORMERS)


def make_model(name: str, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    if name in TRANSFORMERS:
        # Its key biases have no gradient but rounding, which AdamW makes large: not so
        # in float64, where rounding stays below its eps.
        return Transformer(TRANSFORMERS[name]).double()
    return TOY_NETS[name].make_model()


def loss_of(model: nn.Module, name: str, step: int, ranks: list[int]) -> Tensor:
    loss: Tensor = model(*tokens_or_batch(name, step, ranks))
    return loss


def tokens_or_batch(name: str, step: int, ranks: list[int]) -> list[Tensor]:
    """What the model takes: the batches of `ranks`, concatenated."""
    if name in TRANSFORMERS:
        tokens = torch.cat([_tokens(step, rank) for rank in ranks])
        return [tokens[:, :-1], tokens[:, 1:]]
    return [torch.cat([TOY_NETS[name].make_batch(rank, step) for rank in ranks])]


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (2, 7), generator=generator)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


def train(
    name: str, steps: tuple[int, ...] = STEPS, **settings: Any
) -> list[dict[str, Any]]:
    """Full state dicts after so many steps, the last also out of the model."""
    model = make_model(name, 7 + dist.get_rank())  # differ until the broadcast
    if name in WHOLE:
        settings["units"] = []
    zero = Zero3(model, **settings)
    optimizer = make_optimizer(zero.shards())
    states = []
    for step in range(max(steps)):
        loss_of(model, name, step, [dist.get_rank()]).backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in steps:
            states.append(zero.full_state_dict())
    zero.remove()
    states.append({name: p.detach().clone() for name, p in model.state_dict().items()})
    return states


def train_all(
    names: tuple[str, ...], steps: tuple[int, ...], settings: dict[str, Any]
) -> dict[str, Any]:
    return {name: train(name, steps, **settings) for name in names}


def train_alone(
    name: str, world_size: int, steps: tuple[int, ...] = STEPS
) -> list[dict[str, Any]]:
    """The oracle: one process, the ranks' batches concatenated."""
    model = make_model(name)
    optimizer = make_optimizer(model.parameters())
    states = []
    for step in range(max(steps)):
        loss_of(model, name, step, list(range(world_size))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in steps:
            states.append({n: t.clone() for n, t in model.state_dict().items()})
    return [*states, states[-1]]
