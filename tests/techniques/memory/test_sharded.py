"""Plans on a model that Zero3 shards: gathered again before what is computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import overlaplab as ol
from overlaplab.techniques.memory import CheckpointPlan, measure_costs
from overlaplab.techniques.zero import Zero3
from tests.techniques.memory.programs import dropping


def _shards_of_two_steps(plan: CheckpointPlan) -> list[Tensor]:
    model, inputs = dropping()
    zero = Zero3(model)
    optimizer = torch.optim.SGD(zero.shards(), lr=0.1)
    torch.manual_seed(torch.distributed.get_rank())
    with plan.apply(model):
        for _ in range(2):
            optimizer.zero_grad()
            model(*inputs).backward()
            zero.wait()
            optimizer.step()
    return [shard.detach().clone() for shard in zero.shards()]


@pytest.mark.parametrize("policy", ["recompute", "keep attention, matmuls"])
def test_a_sharded_model_learns_the_same_under_a_plan(policy: str) -> None:
    model, inputs = dropping()
    costs = measure_costs(model, inputs, hardware="chalk")
    kept, planned = (
        ol.run(_shards_of_two_steps, plan, world_size=2, hardware="chalk").values
        for plan in (costs.none(), costs.every(1, policy))
    )
    for before, after in zip(kept, planned, strict=True):
        assert len(before) and all(map(torch.equal, before, after))
