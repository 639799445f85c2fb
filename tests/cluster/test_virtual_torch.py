"""torch's own data parallelism runs on the virtual cluster and gives its numbers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings

WORLD_SIZE = 3


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, make_batch):
    for step in range(3):
        model.zero_grad()
        model(make_batch(step)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return [p.detach().clone() for p in model.parameters()]


def of_one_process():
    return train(
        make_model(),
        lambda step: torch.cat([batch(step, r) for r in range(WORLD_SIZE)]),
    )


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters.*:UserWarning")
@pytest.mark.parametrize(
    "setting", ["", "gradient_as_bucket_view", "static_graph", "find_unused_parameters"]
)
def test_ddp_trains_as_one_process_and_without_hazards(setting):
    def step():
        options = {setting: True} if setting else {}
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001, **options)
        return train(model, lambda step: batch(step, dist.get_rank()))

    values, program = run_virtual(step, world_size=WORLD_SIZE)
    for parameters in values:
        for ours, theirs in zip(parameters, of_one_process(), strict=True):
            # The mean of three means instead of one mean: some rounding in float32.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert find_findings(program) == ()


def test_fsdp2_gives_the_gradients_of_one_process():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def step():
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        model = make_model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        model(batch(0, dist.get_rank())).square().mean().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    values, program = run_virtual(step, world_size=WORLD_SIZE)
    reference = make_model()
    whole = torch.cat([batch(0, r) for r in range(WORLD_SIZE)])
    reference(whole).square().mean().backward()
    for gradients in values:
        for ours, theirs in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-5, atol=1e-7)
    names = {o.name for o in program.ranks[0] if o.collective}
    assert names == {"all_gather", "reduce_scatter"}
