"""One representative rank stands for a job that no laptop could hold."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.cluster.virtual import run_virtual


def step(width):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
        )
    model(torch.ones(4, width)).sum().backward()
    for work in works:
        work.wait()
    return model, dist.get_world_size()


def test_one_rank_stands_for_all_and_needs_no_memory():
    ((model, world_size),), program = run_virtual(
        step, (2**16,), world_size=4096, fake=True
    )
    assert world_size == program.world_size == program.represents == 4096
    assert len(program.ranks) == 1
    assert model[0].weight.shape == (2**16, 2**16)  # 16 GiB
    launched = [o.collective for o in program.ranks[0] if o.collective]
    assert [c.bytes for c in launched] == [2**18, 2**34] * 2
    assert {len(c.ranks) for c in launched} == {4096}


def test_a_fake_run_records_what_a_real_one_does():
    _, real = run_virtual(step, (64,), world_size=2)
    _, fake = run_virtual(step, (64,), world_size=2, fake=True)
    assert fake.ranks[0] == real.ranks[0]
    assert fake.waits == tuple(w for w in real.waits if w.rank == 0)
    assert fake.storages == tuple(s for s in real.storages if s.rank == 0)


def test_tensors_of_the_closure_become_fake_with_their_ties_and_flags():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    flat = torch.zeros(8)
    half = flat[:4]

    def look(x):
        assert model[1].weight is model[0].weight
        assert isinstance(model[0].weight, nn.Parameter)
        assert not model[0].bias.requires_grad
        assert half.untyped_storage()._cdata == flat.untyped_storage()._cdata
        return model(x) + half

    (value,), program = run_virtual(look, (torch.ones(2, 4),), world_size=8, fake=True)
    assert value.shape == (2, 4)
    assert [o.name for o in program.ranks[0]] == ["addmm", "addmm", "add"]


def test_a_model_of_fake_tensors_changes_its_dtype():
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight

    def convert():
        made = nn.Linear(8, 8).bfloat16()
        shared.half()
        assert shared[0].weight is shared[1].weight
        shared(torch.ones(1, 4, dtype=torch.half)).sum().backward()
        shared.double()
        return [p.dtype for model in (made, shared) for p in model.parameters()]

    (found,), _ = run_virtual(convert, world_size=8, fake=True)
    assert found == [torch.bfloat16] * 2 + [torch.float64] * 3


@pytest.mark.parametrize("how", ["view", "graph", "optimizer"])
def test_a_model_converts_its_parameters_whoever_refers_to_them(how):
    def convert():
        model = nn.Linear(4, 4)
        loss = model(torch.ones(1, 4)).sum()
        kept = {"view": model.weight.view(-1), "graph": loss}.get(how)
        if how == "optimizer":
            loss.backward()
            kept = torch.optim.AdamW(model.parameters())
            kept.step()
        weight = model.weight
        model.bfloat16()
        assert model.weight is weight and kept is not None
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        return weight.dtype, weight.grad.dtype

    (found,), _ = run_virtual(convert, world_size=8, fake=True)
    assert found == (torch.bfloat16, torch.bfloat16)


def test_a_model_of_fake_tensors_moves_between_the_memories():
    outside = nn.Linear(4, 4)

    def move():
        places = []
        for model in (nn.Linear(4, 4), outside):
            places.append(model.cuda().weight.device)
            places.append(model.cpu().weight.device)
            places.append(model.to(ol.device()).weight.device)
            model(torch.ones(1, 4).cuda()).sum().backward()
        return places

    (found,), fake = run_virtual(move, world_size=8, fake=True)
    gpu = torch.device("cpu", 0)  # as a rank is told
    assert found == [gpu, torch.device("cpu"), gpu] * 2
    (same, _), real = run_virtual(move, world_size=2)
    assert same == found
    assert [op.name for op in fake.ranks[0]] == [op.name for op in real.ranks[0]]


def test_a_fake_loss_is_printed_in_every_way():
    def show():
        loss = nn.Linear(4, 4)(torch.ones(1, 4)).sum()
        print(loss)
        return [f"{loss}", f"loss {loss:.3f}", f"{loss:>10}", str(loss)]

    (texts,), program = run_virtual(show, world_size=8, fake=True)
    assert all("FakeTensor(..., size=()" in text for text in texts)
    waits = [op.name for op in program.ranks[0] if op.kind == "host_wait"]
    assert waits == ["print"] * 5  # as on a GPU


def gathers_objects():
    everybodys, size = [None] * dist.get_world_size(), dist.get_world_size()
    dist.all_gather_object(everybodys, {"lr": 0.5})
    gathered = [None] * size if dist.get_rank() == 0 else None
    dist.gather_object("mine", gathered)
    scattered, told = [None], ["told"]
    dist.scatter_object_list(scattered, [1] * size)
    dist.broadcast_object_list(told)
    return everybodys, gathered, scattered, told


def test_objects_have_values_where_tensors_have_none():
    (found,), fake = run_virtual(gathers_objects, world_size=3, fake=True)
    assert found == ([{"lr": 0.5}] * 3, ["mine"] * 3, [1], ["told"])
    (same, _, _), real = run_virtual(gathers_objects, world_size=3)
    assert same == found
    assert fake.ranks[0] == real.ranks[0]


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all"])
def test_collectives_complete_with_themselves(operation):
    def launch():
        n = dist.get_world_size()
        small, large = torch.ones(2), torch.ones(2 * n)
        if operation == "all_gather":
            dist.all_gather_into_tensor(large, small)
        elif operation == "reduce_scatter":
            dist.reduce_scatter_tensor(small, large)
        else:
            dist.all_to_all_single(torch.empty(2 * n), large)
        dist.barrier()
        return large + 1

    _, program = run_virtual(launch, world_size=64, fake=True)
    launched = [o.collective for o in program.ranks[0] if o.collective]
    assert [c.operation for c in launched] == [operation, "barrier"]
    assert launched[0].bytes == 4 * 2 * 64
