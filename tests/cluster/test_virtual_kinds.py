"""Memory by kind of real programs, and the names of optimizer states."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlaplab as ol
from overlaplab.program import memory_kinds, resolve

F32 = 4


def net(width=8):
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU())


def most(run, rank=0):
    """The most bytes that each kind ever has."""
    # Of a machine whose allocator gives what it is asked for.
    memory = resolve(run.program, "chalk").memory[rank]
    return {kind: max(sizes) for kind, sizes in memory.kinds if max(sizes)}


def names_of(run, kind):
    kinds = memory_kinds(run.program, 0)
    found = [s for s in run.program.storages if s.rank == 0 and s.bytes]
    return [s.name for s in found if kinds[s.storage] == kind]


def test_a_training_step_of_one_process():
    def step():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()

    run = ol.run(step, world_size=1)
    sizes = most(run)
    matrix = 8 * 8 * F32
    assert sizes["parameters"] == sizes["gradients"] == matrix
    assert sizes["inputs"] == 4 * 8 * F32
    assert sizes["states"] == 2 * matrix + 4  # and the number of the step
    assert names_of(run, "parameters") == ["0.weight"]
    assert names_of(run, "gradients") == 2 * ["grad 0.weight"]
    assert names_of(run, "states") == [
        "step 0.weight",
        "exp_avg 0.weight",
        "exp_avg_sq 0.weight",
    ]


def test_fake_tensors_have_the_same_kinds():
    def step():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    real, fake = (ol.run(step, fake=fake) for fake in (False, True))
    assert fake.timeline.memory[0] == real.timeline.memory[0]
    assert names_of(real, "states") == ["momentum_buffer 0.weight"]


def test_names_that_the_user_gave_go_first():
    def step():
        weight = nn.Parameter(torch.ones(8))
        optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
        (weight * 2).sum().backward()
        ol.name_tensor(weight.grad, "mine")
        optimizer.step()

    run = ol.run(step, world_size=1)
    assert names_of(run, "gradients") == ["mine"]
    assert names_of(run, "parameters") == [""]
    assert names_of(run, "states") == ["momentum_buffer"]


def test_what_a_hook_handles_is_not_the_gradient():
    def step():
        model, buffer = net(), torch.empty(64)

        def send(parameter):
            part = buffer.detach()
            part.copy_(parameter.grad.flatten())
            dist.all_reduce(part)

        model[0].weight.register_post_accumulate_grad_hook(send)
        model(torch.randn(4, 8)).sum().backward()

    sizes = most(ol.run(step))
    assert sizes["gradients"] == sizes["communication"] == 64 * F32


def test_ddp_has_replicas_and_buckets():
    def step():
        model = nn.parallel.DistributedDataParallel(net())
        model(torch.randn(4, 8)).sum().backward()

    sizes = most(ol.run(step))
    matrix = 8 * 8 * F32
    assert "shards" not in sizes and "gathered" not in sizes
    assert sizes["parameters"] == sizes["gradients"] == matrix
    assert sizes["communication"] >= matrix


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_gathers_one_layer_or_all(reshard):
    width, size = 64, 2

    def step():
        mesh = init_device_mesh("cpu", (size,))
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, width)).sum().backward()
            optimizer.step()

    run = ol.run(step, world_size=size)
    sizes, matrix = most(run), width * width * F32
    assert sizes["shards"] == 4 * matrix // size
    assert 0 <= sizes["states"] - 2 * sizes["shards"] <= 4 * F32
    assert sizes["gathered"] == (1 if reshard else 4) * matrix
    # All shards' and the whole one of the last layer that is reduced.
    assert sizes["gradients"] == 4 * matrix // size + matrix
    assert "exp_avg 3.weight" in names_of(run, "states")
    assert "grad 3.weight" in names_of(run, "gradients")


def test_a_prefetcher_by_hand():
    """Shards of one's own, gathered into a buffer whose memory comes and goes."""
    size = 2

    def step():
        shard = nn.Parameter(torch.randn(16))
        full = torch.empty(size * 16)
        full.untyped_storage().resize_(0)
        optimizer = torch.optim.SGD([shard], 0.1)
        for _ in range(2):
            full.untyped_storage().resize_(size * 16 * F32)
            dist.all_gather_into_tensor(full, shard.detach())
            weight = full.view(8, 4).requires_grad_()
            torch.ones(2, 8).mm(weight).sum().backward()
            shard.grad = torch.empty(16)
            dist.reduce_scatter_tensor(shard.grad, weight.grad.flatten())
            optimizer.step()
            full = full.detach()
            full.untyped_storage().resize_(0)

    sizes = most(ol.run(step, world_size=size))
    assert sizes["shards"] == 16 * F32
    assert sizes["gathered"] == size * 16 * F32
    assert "parameters" not in sizes


def test_dtensor_s_arithmetic_with_shapes_is_no_kernel():
    """It runs the operator once in a process on fake tensors of the global shape."""

    def step():
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.ones(24, 7), mesh, [Shard(0)])
        return part.cosh().to_local()

    # One run alone: with torch 2.11 a second one that uses a DTensor stands in C++.
    first = ol.run(step, fake=True).program
    assert [op.name for op in first.ranks[0]].count("cosh") == 1
    assert max(s.bytes for s in first.storages) == 24 * 7 * F32
