"""torch's own data parallelism runs on the virtual cluster and gives its numbers."""

import subprocess
import sys

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


@pytest.mark.parametrize("hook, rtol", [("allreduce_hook", 1e-5), ("fp16", 1e-2)])
def test_ddp_waits_for_what_its_hooks_launch_after_the_backward_pass(hook, rtol):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"fp16": default_hooks.fp16_compress_hook}

    def step():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
        model.register_comm_hook(None, hooks.get(hook, default_hooks.allreduce_hook))
        return train(model, lambda step: batch(step, dist.get_rank()))

    values, program = run_virtual(step, world_size=WORLD_SIZE)
    for ours, theirs in zip(values[2], of_one_process(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-3 * rtol)
    assert find_findings(program) == ()
    ops = program.ranks[0]
    last_launch = max(op.index for op in ops if op.name == "all_reduce")
    waits = [w for w in program.waits if w.rank == 0 and ops[w.op].index > 0]
    in_last_step = [w for w in waits if w.op > last_launch - 20][-2:]
    assert [w.before > last_launch for w in in_last_step] == [True, True]


def test_ddp_without_sync_adds_up_and_averages_in_the_last_pass():
    def step():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
        with model.no_sync():
            model(batch(0, dist.get_rank())).square().mean().backward()
        model(batch(1, dist.get_rank())).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    values, program = run_virtual(step, world_size=WORLD_SIZE)
    reference = make_model()
    for number in range(2):
        whole = torch.cat([batch(number, rank) for rank in range(WORLD_SIZE)])
        reference(whole).square().mean().backward()
    for ours, p in zip(values[1], reference.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=1e-5, atol=1e-7)
    assert find_findings(program) == ()


def noise_like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3) + torch.full_like(x, 2.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_compiles_in_a_rank_and_after_the_run():
    # torch scripts when ZeroRedundancyOptimizer is imported, be it in a rank.
    def step():
        return torch.jit.script(noise_like)(torch.ones(3)).tolist()

    assert run_virtual(step, world_size=2)[0] == ([2.0] * 3,) * 2
    assert step() == [2.0] * 3


FIRST_IMPORT = """
import overlaplab as ol

def step():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn import Linear
    from torch.optim import SGD

    model = Linear(4, 4)
    ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    return 7

print(ol.run(step).values)
"""


def test_torchs_optimizers_of_many_ranks_may_be_imported_in_a_rank_first():
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_IMPORT], capture_output=True, text=True
    )
    assert ran.stdout == "(7, 7)\n", ran.stderr[-2000:]
