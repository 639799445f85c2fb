"""What is ordered, by whatever chain, is no hazard; neither is anything else found."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from tests.hazards.right_programs import RIGHT


@pytest.mark.parametrize("program", RIGHT, ids=lambda p: p.__name__)
def test_nothing_is_found_in(program):
    _, record = run_virtual(program, world_size=2)
    assert [str(finding) for finding in find_findings(record)] == []


def fsdp2(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def ddp(model):
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)


@pytest.mark.parametrize("parallel", [fsdp2, ddp])
def test_nothing_is_found_in_torchs_own(parallel):
    def step():
        model = parallel(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    _, record = run_virtual(step, world_size=2)
    assert [str(finding) for finding in find_findings(record)] == []
