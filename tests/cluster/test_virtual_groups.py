"""Several communicators: each has its own order, and ranks meet in the right one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlaplab as ol
from overlaplab import streams
from overlaplab.errors import DeadlockError


def reduced(group):
    """The sum of the members' rank numbers."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item()


def two_groups(synchronize):
    """B06: rank 0 launches in G1, then G2; rank 1 the other way round."""
    groups = [dist.new_group(group_desc=name) for name in ("G1", "G2")]
    xs = [torch.ones(4), torch.full((4,), 2.0)]
    works = []
    for i in (0, 1) if dist.get_rank() == 0 else (1, 0):
        works.append(dist.all_reduce(xs[i], group=groups[i], async_op=True))
        if synchronize:
            works[-1].wait()
            streams.synchronize()
    for work in works:
        work.wait()
    return [x[0].item() for x in xs]


def test_opposite_orders_with_a_sync_between_name_the_first_difference():
    with pytest.raises(DeadlockError) as found:
        ol.run(two_groups, True)
    lines = str(found.value).splitlines()
    assert lines[1].startswith(
        "  rank 0 waits in all_reduce #0 of process group 'G1' for rank 1 ["
    )
    assert lines[2].startswith(
        "  rank 1 waits in all_reduce #0 of process group 'G2' for rank 0 ["
    )
    assert lines[3].startswith("Their orders part at collective 0 of those")
    assert lines[4].startswith(
        "  rank 0: all_reduce #0 of process group 'G1' [test_virtual_groups"
    )
    assert lines[5].startswith(
        "  rank 1: all_reduce #0 of process group 'G2' [test_virtual_groups"
    )


def test_opposite_orders_without_a_sync_end_since_each_group_has_its_stream():
    run = ol.run(two_groups, False)
    assert run.values == ([2.0, 4.0],) * 2
    assert run.warnings == ()


def subgroups():
    own, _ = dist.new_subgroups(2)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return reduced(own), reduced(crossed)


def local_groups():
    """Only the members make the group."""
    mine = [0, 2] if dist.get_rank() % 2 == 0 else [1, 3]
    return reduced(dist.new_group(mine, use_local_synchronization=True))


def overlapping_groups():
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [2, 3], [3, 0])]
    mine = [g for g in groups if dist.get_rank() in dist.get_process_group_ranks(g)]
    return [reduced(group) for group in mine]


def groups_made_anew():
    found = []
    for _ in range(3):
        group = dist.new_group([0, 1, 2])
        if dist.get_rank() < 3:
            found.append(reduced(group))
            dist.destroy_process_group(group)
    return found


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return reduced(mesh["tensor"].get_group()), reduced(mesh["data"].get_group())


@pytest.mark.parametrize(
    "program",
    [subgroups, local_groups, overlapping_groups, groups_made_anew, meshes],
    ids=lambda program: program.__name__,
)
def test_groups_give_what_they_give_on_gloo(program):
    run = ol.run(program, world_size=4)
    assert run.values == ol.run(program, world_size=4, cluster="gloo").values
    assert run.warnings == ()


def test_a_split_of_a_group_counts_its_ranks_in_the_parents_numbers():
    def step():
        upper = dist.split_group(split_ranks=[[2, 3]], group_desc="upper")
        if upper is None:
            return None
        alone = dist.split_group(upper, [[1]])
        return reduced(upper), None if alone is None else reduced(alone)

    assert ol.run(step, world_size=4).values == (None, None, (5.0, None), (5.0, 3.0))


def test_a_split_into_nothing_is_refused():
    with pytest.raises(Exception, match="split_ranks cannot be None or empty"):
        ol.run(lambda: dist.split_group(split_ranks=[]))


def test_lanes_of_a_mesh_have_the_names_of_its_dimensions():
    def step():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for name in ("tensor", "data"):
            group = mesh[name].get_group()
            dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()

    program = ol.run(step, world_size=4).program
    lanes = [op.stream for op in program.ranks[3] if op.collective]
    assert lanes == ["comm:mesh_tensor", "comm:mesh_data"]
