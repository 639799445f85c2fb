"""Every collective gives what its definition says, at one to four ranks."""

import pytest
import torch
import torch.distributed as dist

from overlaplab.cluster.virtual import run_virtual

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def of_rank(rank, *shape, dtype=torch.float32):
    """Different on every rank, and exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def of_all(world_size, *shape, dtype=torch.float32):
    return torch.stack([of_rank(r, *shape, dtype=dtype) for r in range(world_size)])


def run(fn, world_size):
    values, _ = run_virtual(fn, world_size=world_size)
    return values


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


REDUCTIONS = {
    "SUM": lambda x: x.sum(0),
    "MAX": lambda x: x.amax(0),
    "MIN": lambda x: x.amin(0),
    "PRODUCT": lambda x: x.prod(0),
    "AVG": lambda x: x.sum(0) / len(x),
}


@world_sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_all_reduce_reduces(name, dtype, world_size):
    if name == "AVG" and dtype == torch.int64:
        pytest.skip("the mean of integers is no integer")

    def step():
        x = of_rank(dist.get_rank(), 3, 2, dtype=dtype)
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        return x

    expected = REDUCTIONS[name](of_all(world_size, 3, 2, dtype=dtype)).to(dtype)
    for value in run(step, world_size):
        # 8 ** 4 has more digits than bfloat16 keeps.
        torch.testing.assert_close(value, expected, rtol=2**-7, atol=0)


@world_sizes
def test_the_coalesced_all_reduce_reduces_each_tensor(world_size):
    def step():
        xs = [of_rank(dist.get_rank(), n) for n in (1, 4, 0)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        return xs

    for xs in run(step, world_size):
        for x in xs:
            assert_equal(x, of_all(world_size, x.numel()).sum(0))


@world_sizes
def test_broadcast_sends_the_roots_tensor(world_size):
    def step():
        x = of_rank(dist.get_rank(), 5).t()
        dist.broadcast(x, src=world_size - 1)
        return x

    for value in run(step, world_size):
        assert_equal(value, of_rank(world_size - 1, 5))


@world_sizes
def test_reduce_changes_the_root_only(world_size):
    def step():
        x = of_rank(dist.get_rank(), 5)
        dist.reduce(x, dst=world_size - 1)
        return x

    *others, last = run(step, world_size)
    assert_equal(last, of_all(world_size, 5).sum(0))
    for rank, value in enumerate(others):
        assert_equal(value, of_rank(rank, 5))


@world_sizes
def test_all_gather_gives_everybody_everything(world_size):
    def step():
        x = of_rank(dist.get_rank(), 2, 3)
        parts = [torch.empty(2, 3) for _ in range(world_size)]
        dist.all_gather(parts, x)
        whole = torch.empty(2 * world_size, 3)
        dist.all_gather_into_tensor(whole, x)
        return parts, whole

    for parts, whole in run(step, world_size):
        assert_equal(torch.stack(parts), of_all(world_size, 2, 3))
        assert_equal(whole, of_all(world_size, 2, 3).flatten(0, 1))


@world_sizes
def test_the_coalesced_all_gather_gathers_each_tensor(world_size):
    def step():
        xs = [of_rank(dist.get_rank(), n) for n in (2, 3)]
        wholes = [torch.empty(x.numel() * world_size) for x in xs]
        with dist._coalescing_manager(async_ops=True) as manager:
            for whole, x in zip(wholes, xs, strict=True):
                dist.all_gather_into_tensor(whole, x)
        manager.wait()
        return wholes

    for first, second in run(step, world_size):
        assert_equal(first, of_all(world_size, 2).flatten())
        assert_equal(second, of_all(world_size, 3).flatten())


@world_sizes
@pytest.mark.parametrize("name", ["SUM", "AVG", "MAX"])
def test_reduce_scatter_gives_each_rank_its_shard(name, world_size):
    op = getattr(dist.ReduceOp, name)

    def step():
        x = of_rank(dist.get_rank(), 2 * world_size, 3)
        shard = torch.empty(2, 3)
        dist.reduce_scatter_tensor(shard, x, op)
        from_list = torch.empty(2, 3)
        dist.reduce_scatter(from_list, list(x.chunk(world_size)), op)
        return shard, from_list

    whole = REDUCTIONS[name](of_all(world_size, 2 * world_size, 3))
    for rank, (shard, from_list) in enumerate(run(step, world_size)):
        assert_equal(shard, whole[2 * rank : 2 * rank + 2])
        assert_equal(from_list, shard)


@world_sizes
def test_the_coalesced_reduce_scatter_scatters_each_tensor(world_size):
    def step():
        xs = [of_rank(dist.get_rank(), n * world_size) for n in (2, 3)]
        shards = [torch.empty(2), torch.empty(3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for shard, x in zip(shards, xs, strict=True):
                dist.reduce_scatter_tensor(shard, x)
        manager.wait()
        return shards

    for rank, shards in enumerate(run(step, world_size)):
        for shard in shards:
            n = shard.numel()
            whole = of_all(world_size, n * world_size).sum(0)
            assert_equal(shard, whole[rank * n : (rank + 1) * n])


@world_sizes
def test_all_to_all_transposes(world_size):
    def step():
        rank = dist.get_rank()
        sent = [torch.full((j + 1,), 10 * rank + j) for j in range(world_size)]
        got = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_to_all(got, sent)
        single = torch.empty(world_size, dtype=torch.int64)
        dist.all_to_all_single(single, torch.arange(world_size) + 10 * rank)
        splits = list(range(1, world_size + 1))
        uneven = torch.empty(world_size * (rank + 1), dtype=torch.int64)
        dist.all_to_all_single(uneven, torch.cat(sent), [rank + 1] * world_size, splits)
        return got, single, uneven

    for rank, (got, single, uneven) in enumerate(run(step, world_size)):
        expected = [torch.full((rank + 1,), 10 * i + rank) for i in range(world_size)]
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
        assert_equal(single, torch.tensor([10 * i + rank for i in range(world_size)]))
        assert_equal(uneven, torch.cat(expected))


@world_sizes
def test_gather_and_scatter_are_each_others_inverse(world_size):
    root = world_size - 1

    def step():
        rank = dist.get_rank()
        x = of_rank(rank, 3)
        parts = [torch.empty(3) for _ in range(world_size)] if rank == root else None
        dist.gather(x, parts, dst=root)
        back = torch.empty(3)
        dist.scatter(back, parts, src=root)
        return parts, back

    values = run(step, world_size)
    assert_equal(torch.stack(values[root][0]), of_all(world_size, 3))
    for rank, (_, back) in enumerate(values):
        assert_equal(back, of_rank(rank, 3))


@world_sizes
def test_send_and_receive_pass_round_a_ring(world_size):
    def step():
        rank = dist.get_rank()
        got = torch.empty(3)
        if world_size > 1:
            # Every rank receives first: a blocking pair would be a deadlock.
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, got, (rank - 1) % world_size),
                    dist.P2POp(dist.isend, of_rank(rank, 3), (rank + 1) % world_size),
                ]
            )
            for work in works:
                work.wait()
            return got
        return of_rank(rank, 3)

    for rank, got in enumerate(run(step, world_size)):
        assert_equal(got, of_rank((rank - 1) % world_size, 3))


@world_sizes
def test_objects_are_broadcast_and_gathered(world_size):
    def step():
        rank = dist.get_rank()
        box = [{"from": rank}]
        dist.broadcast_object_list(box, src=world_size - 1)
        everybody = [None] * world_size
        dist.all_gather_object(everybody, "x" * rank)
        dist.barrier()
        return box, everybody

    for box, everybody in run(step, world_size):
        assert box == [{"from": world_size - 1}]
        assert everybody == ["x" * rank for rank in range(world_size)]


def test_groups_have_their_own_ranks_lanes_and_counts():
    def step():
        rank = dist.get_rank()
        evens = dist.new_group([0, 2], group_desc="pair")
        odds = dist.new_group([1, 3], group_desc="pair")
        mine = evens if rank % 2 == 0 else odds
        x = torch.ones(2) * rank
        dist.all_reduce(x, group=mine, async_op=True).wait()
        dist.broadcast(x, src=rank % 2 + 2, group=mine, async_op=True).wait()
        assert (dist.get_world_size(mine), dist.get_rank(mine)) == (2, rank // 2)
        return x

    values, program = run_virtual(step, world_size=4)
    assert [v[0].item() for v in values] == [2, 4, 2, 4]
    groups = {}
    for ops in program.ranks:
        for op in ops:
            if op.collective:
                assert op.stream == "comm:pair"
                key = (op.collective.group, op.collective.sequence)
                groups.setdefault(key, []).append(op.rank)
    assert groups == {
        ("pair", 0): [0, 2],
        ("pair", 1): [0, 2],
        ("pair [1, 3]", 0): [1, 3],
        ("pair [1, 3]", 1): [1, 3],
    }


def test_functional_collectives_are_recorded_once():
    from torch.distributed import _functional_collectives as functional

    def step():
        x = torch.ones(4) * (dist.get_rank() + 1)
        y = functional.all_reduce(x, "sum", dist.group.WORLD)
        gather = getattr(functional, "all_gather_single", None)  # 2.13's name
        gather = gather or functional.all_gather_tensor
        z = gather(x, 0, dist.group.WORLD)
        w = functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)
        return y + 0, z + 0, w + 0

    values, program = run_virtual(step, world_size=2)
    assert values[1][0].tolist() == [3.0] * 4
    assert values[1][1].tolist() == [1.0] * 4 + [2.0] * 4
    assert values[1][2].tolist() == [3.0] * 2
    launched = [o.name for o in program.ranks[0] if o.collective]
    assert launched == ["all_reduce", "all_gather", "reduce_scatter"]


def test_a_write_to_an_input_after_the_launch_does_not_reach_the_others():
    def step():
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        x.zero_()
        work.wait()
        return x

    values, _ = run_virtual(step, world_size=2)
    assert values[0].tolist() == [2.0, 2.0]


def test_channels_last_is_reduced_in_place():
    def step():
        x = of_rank(dist.get_rank(), 2, 3, 4, 4).to(memory_format=torch.channels_last)
        dist.all_reduce(x)
        return x

    for value in run(step, 2):
        assert_equal(value, of_all(2, 2, 3, 4, 4).sum(0))
        assert value.is_contiguous(memory_format=torch.channels_last)


@world_sizes
def test_collectives_of_one_communicator_see_what_those_before_wrote(world_size):
    def step():
        one, all_, back = torch.ones(2), torch.zeros(2 * world_size), torch.zeros(2)
        works = [
            dist.all_reduce(one, async_op=True),
            dist.all_reduce(one, async_op=True),
            dist.all_gather(list(all_.chunk(world_size)), one, async_op=True),
            dist.reduce_scatter(back, list(all_.chunk(world_size)), async_op=True),
        ]
        for work in reversed(works):
            work.wait()
        return one.tolist(), all_.tolist(), back.tolist()

    for one, all_, back in run(step, world_size):
        assert one == [world_size**2] * 2
        assert all_ == [world_size**2] * 2 * world_size
        assert back == [world_size**3] * 2


@world_sizes
def test_a_waited_result_that_backward_saves_is_not_taken_for_modified(world_size):
    def step():
        weight = torch.full((2,), 1.0 + dist.get_rank(), requires_grad=True)
        x = torch.ones(2, requires_grad=True)
        dist.broadcast(weight.detach(), src=0, async_op=True).wait()
        (x * weight).sum().backward()
        return x.grad.tolist()

    assert run(step, world_size) == ([1.0, 1.0],) * world_size
