"""Rank 0 stands for all: over groups and meshes, and not where ranks have roles."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import overlaplab as ol
from overlaplab.cluster.virtual import run_virtual


def represented(step, world_size=4096):
    (value,), program = run_virtual(step, world_size=world_size, fake=True)
    return value, [o.collective for o in program.ranks[0] if o.collective]


def brief(collectives):
    return [(c.operation, len(c.ranks), c.ranks[:3], c.bytes) for c in collectives]


def test_a_mesh_has_the_groups_of_rank_0():
    def step():
        mesh = init_device_mesh("cpu", (512, 8), mesh_dim_names=("dp", "tp"))
        x = torch.ones(64)
        dist.all_reduce(x, group=mesh["tp"].get_group())
        dist.all_reduce(x, group=mesh.get_group("dp"))
        return mesh.get_coordinate(), mesh["dp"].size()

    value, collectives = represented(step)
    assert value == ((0, 0), 512)
    assert brief(collectives) == [
        ("all_reduce", 8, (0, 1, 2), 256),
        ("all_reduce", 512, (0, 8, 16), 256),
    ]


def test_a_hierarchical_all_reduce_has_both_kinds_of_groups():
    def step():
        node = dist.new_group(list(range(8)))
        across = dist.new_group(list(range(0, 4096, 8)))
        grad, shard = torch.ones(64), torch.empty(8)
        dist.reduce_scatter_tensor(shard, grad, group=node)
        dist.all_reduce(shard, group=across)
        dist.all_gather_into_tensor(grad, shard, group=node)

    _, collectives = represented(step)
    assert brief(collectives) == [
        ("reduce_scatter", 8, (0, 1, 2), 256),
        ("all_reduce", 512, (0, 8, 16), 32),
        ("all_gather", 8, (0, 1, 2), 256),
    ]


def test_fsdp2_shards_in_a_node_and_replicates_across():
    from torch.distributed.fsdp import fully_shard

    def step():
        mesh = init_device_mesh("cpu", (512, 8), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh())
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(4, 64)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    _, collectives = represented(step)
    whole = 4 * 64 * 64
    assert brief(collectives)[0] == ("all_gather", 8, (0, 1, 2), whole)
    assert brief(collectives)[-2:] == [
        ("reduce_scatter", 8, (0, 1, 2), whole),
        ("all_reduce", 512, (0, 8, 16), whole // 8),
    ]


@pytest.mark.parametrize("fake", [True, False])
def test_what_a_mesh_computes_about_ranks_is_not_the_programs(fake):
    def step():
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]

    _, program = run_virtual(step, world_size=4, fake=fake)
    assert program.ranks[0] == ()


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_functional_collectives_are_recorded_as_with_values():
    def step():
        world = dist.group.WORLD
        x = fc.all_reduce(torch.ones(8), "sum", world)
        x = fc.all_gather_tensor(x + 1, 0, world)
        x = fc.reduce_scatter_tensor(x, "avg", 0, world)
        x = fc.all_to_all_single(x, None, None, world)
        x = fc.broadcast(x, 0, world)
        one, other = fc.all_reduce_coalesced([x, x * 2], "max", world)
        return one + other

    _, real = run_virtual(step, world_size=2)
    _, fake = run_virtual(step, world_size=2, fake=True)
    assert len([o for o in real.ranks[0] if o.collective]) == 6
    assert fake.ranks[0] == real.ranks[0]
    assert fake.waits == tuple(w for w in real.waits if w.rank == 0)


def test_tensor_parallel_layers_reduce_in_their_node():
    def step():
        mesh = init_device_mesh("cpu", (512, 8), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        dist.barrier()
        model(torch.ones(4, 64)).sum().backward()

    _, collectives = represented(step)
    at = [c.operation for c in collectives].index("barrier")
    assert brief(collectives[at + 1 :]) == [("all_reduce", 8, (0, 1, 2), 4 * 4 * 64)]


def test_a_ring_that_all_ranks_shift_is_represented():
    def step():
        n = dist.get_world_size()
        mine, theirs = torch.ones(4), torch.empty(4)
        ops = [
            dist.P2POp(dist.isend, mine, 1),
            dist.P2POp(dist.irecv, theirs, n - 1),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return theirs + 1

    _, collectives = represented(step)
    assert [c.operation for c in collectives] == ["send", "recv"]


@pytest.mark.parametrize("pipeline", [False, True])
def test_messages_of_ranks_with_roles_are_refused(pipeline):
    def step():
        if dist.get_rank() == 0:
            dist.send(torch.ones(4), 1)
            if pipeline:
                dist.recv(torch.ones(4), 1)

    with pytest.raises(ol.MismatchError, match=r"(?s)rank 0 stand for all.*fake=False"):
        represented(step)


VALUES = {
    "item": lambda: torch.ones(3).sum().item(),
    "branch": lambda: 1 if torch.ones(1) > 0 else 2,
    "tolist": lambda: torch.ones(3).tolist(),
    "mask": lambda: torch.ones(3)[torch.ones(3) > 0],
    "ddp": lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("what", VALUES)
def test_what_needs_a_value_is_refused_with_the_way_out(what):
    with pytest.raises(ol.RankError, match=r"(?s)shapes and no values.*fake=False"):
        represented(VALUES[what], world_size=4)


# -- ranks in roles: each of the first ones stands for as many as there are of its kind

STAGES = 4


def pipeline(num_batches=3):
    """Stage by stage through the ranks of one replica; gradients across replicas."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = rank % STAGES
    for first in range(STAGES):  # every rank makes every group
        group = dist.new_group(list(range(first, size, STAGES)))
        if first == stage:
            replicas = group
    layer = nn.Linear(32, 32)
    for _ in range(num_batches):
        x = torch.ones(8, 32)
        if stage > 0:
            dist.recv(x, rank - 1)
        y = layer(x)
        if stage < STAGES - 1:
            dist.send(y.detach(), rank + 1)
    y.sum().backward()
    dist.all_reduce(layer.weight.grad, group=replicas)
    norm = layer.weight.grad.square().sum()
    dist.all_reduce(norm)
    names = [None] * size
    dist.all_gather_object(names, stage)
    return stage, names


@pytest.fixture(scope="module")
def staged():
    return ol.run(pipeline, world_size=1024, fake=STAGES)


def test_stages_of_a_pipeline_stand_each_for_its_replicas(staged):
    assert [stage for stage, _ in staged.values] == [0, 1, 2, 3]
    program, timeline = staged.program, staged.timeline
    assert (program.world_size, program.represents, len(program.ranks)) == (
        1024,
        256,
        4,
    )
    assert (timeline.num_ranks, timeline.represents) == (4, 256)
    assert "1024 ranks" in repr(staged) and staged.warnings == ()
    assert staged.values[3][1] == list(range(STAGES)) * 256


def test_a_stage_starts_when_the_one_before_it_has_sent(staged):
    def kernels(rank, name):
        return [s for s in staged.timeline.spans if (s.rank, s.name) == (rank, name)]

    for stage in range(1, STAGES):
        before = kernels(stage - 1, "addmm")[0]
        assert kernels(stage, "addmm")[0].start_ns > before.end_ns


def test_ranks_in_roles_are_recorded_as_with_values(staged):
    small = ol.run(pipeline, world_size=2 * STAGES, fake=STAGES).program
    real = ol.run(pipeline, world_size=2 * STAGES).program
    assert small.ranks == real.ranks[:STAGES]
    assert small.waits == tuple(w for w in real.waits if w.rank < STAGES)


def test_who_waits_for_another_role_that_never_comes_is_named():
    def step():
        if dist.get_rank() % 2:
            dist.recv(torch.ones(4), dist.get_rank() - 1)
            torch.ones(4).add_(1)

    with pytest.raises(ol.DeadlockError, match="rank 1 waits in recv"):
        ol.run(step, world_size=8, fake=2)


def test_roles_that_differ_in_a_collective_are_named():
    def step():
        dist.all_reduce(torch.ones(4 + dist.get_rank() % 2))

    with pytest.raises(ol.MismatchError, match="ranks differ in collective #0"):
        ol.run(step, world_size=8, fake=2)


@pytest.mark.parametrize(("fake", "size"), [(3, 8), (16, 8), (-1, 8)])
def test_roles_that_do_not_divide_the_world_are_refused(fake, size):
    with pytest.raises(ValueError, match=f"fake={fake} .*world_size={size}.*divisor"):
        ol.run(pipeline, world_size=size, fake=fake)
