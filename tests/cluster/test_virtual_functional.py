"""Functional collectives, and graphs that hold them, run as on gloo; a wait comes where
the graph has it."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx

import overlaplab as ol
from tests.guards import GUARD_S


def every_collective(x, group):
    """Each result is used once, so that each is waited for."""
    gathered = functional.all_gather_tensor(x, 0, group)
    results = [
        functional.all_reduce(x, "sum", group),
        gathered,
        functional.reduce_scatter_tensor(gathered, "avg", 0, group),
        functional.all_to_all_single(gathered, None, None, group),
        functional.broadcast(x, 0, group),
        *functional.all_reduce_coalesced([x, x * 2], "sum", group),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], group),
        *functional.reduce_scatter_tensor_coalesced(
            [gathered, gathered * 2], "sum", [0, 0], group
        ),
    ]
    return [result + 0 for result in results]


def numbers(rank):
    return torch.arange(24.0).view(12, 2) + 100 * rank


def expected(rank, size):
    """The same results, made of everybody's numbers in one process."""
    xs = [numbers(r) for r in range(size)]
    total, gathered = sum(xs), torch.cat(xs)
    reduced = [total, total * 2]
    scattered = [xs[rank] * size, xs[rank] * size * 2]
    return [
        *(total, gathered, xs[rank], xs[rank].repeat(size, 1), xs[0]),
        *(*reduced, gathered, gathered + 1, *scattered),
    ]


def quietly(fn, *args):
    """`fn(*args)` without the warnings of 2.13 that names have changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args)


def on_this_rank(run):
    x = numbers(dist.get_rank())
    return [t.tolist() for t in quietly(run, x, dist.group.WORLD.group_name)]


def traced(x, group):
    return make_fx(lambda y: every_collective(y, group))(x)(x)


def traced_with_fakes(x, group):
    graph = make_fx(lambda y: every_collective(y, group), tracing_mode="fake")(x)
    return graph(x)


def compiled(backend):
    def run(x, group):
        return torch.compile(every_collective, backend=backend)(x, group)

    return run


def check(run, size, **where):
    found = ol.run(lambda: on_this_rank(run), world_size=size, **where)
    assert found.values == tuple(
        [t.tolist() for t in expected(rank, size)] for rank in range(size)
    )
    assert found.warnings == ()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [every_collective, traced, traced_with_fakes])
def test_every_functional_collective_gives_its_values_on_each_rank(run, size):
    check(run, size)


def test_gloo_gives_the_same_values():
    # Its processes import much of torch first: long on a busy machine.
    check(every_collective, 2, cluster="gloo", timeout_s=GUARD_S)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_give_the_same_values_on_each_rank(backend):
    check(compiled(backend), 2)


def test_each_rank_compiles_for_itself():
    def step():
        fn = torch.compile(lambda x: x + dist.get_rank(), backend="eager")
        return fn(torch.zeros(1)).item()

    assert ol.run(step, world_size=3).values == (0.0, 1.0, 2.0)


def behind(wait_first):
    """Which operators of a graph come after its all-reduce."""

    def step():
        group = dist.group.WORLD.group_name

        def fn(x, y):
            total = torch.ops._c10d_functional.all_reduce(x, "sum", group)
            if wait_first:
                total = torch.ops._c10d_functional.wait_tensor(total)
            product = y.mm(y)
            if not wait_first:
                total = torch.ops._c10d_functional.wait_tensor(total)
            return total.sub(product)

        x, y = torch.ones(4, 4), torch.ones(4, 4)
        graph = make_fx(fn, tracing_mode="fake")(x, y)
        return graph(x, y)[0, 0].item()

    run = ol.run(step)
    assert run.values == (-2.0, -2.0)
    assert run.warnings == ()
    ops = run.program.ranks[0]
    sent = next(op.index for op in ops if op.collective)
    return [op.name for op in ops if sent in op.after and op.kind == "compute"]


def test_the_wait_of_a_graph_holds_up_what_the_graph_has_behind_it():
    assert behind(wait_first=True) == ["mm"]
    assert behind(wait_first=False) == ["sub"]


def test_ranks_that_trace_in_turn_leave_torch_as_it_was():
    call, getter = torch.nn.Module.__call__, torch.nn.Module.__getattr__
    ol.run(lambda: on_this_rank(traced), world_size=4)
    assert (torch.nn.Module.__call__, torch.nn.Module.__getattr__) == (call, getter)


def test_who_sends_in_place_launches_the_copy_that_is_sent():
    """As the C++ does; gathers and scatters have an output of their own."""

    def on_rank():
        x, group = torch.ones(4), dist.group.WORLD
        quietly(functional.all_reduce, x, "sum", group).add_(0)
        functional.broadcast(x, 0, group).add_(0)
        for y in functional.all_reduce_coalesced([x, x], "sum", group):
            y.add_(0)
        quietly(functional.all_gather_tensor, x, 0, group).add_(0)
        return x

    for options in ({}, {"fake": True}):
        done = ol.run(on_rank, world_size=2, check=False, **options)
        names = [op.name for op in done.program.ranks[0] if op.kind != "host"]
        assert names[1:] == [
            *("clone", "all_reduce", "add_", "clone", "broadcast", "add_"),
            *("clone", "clone", "all_reduce", "add_", "add_", "all_gather", "add_"),
        ]
        if not options:
            assert all(x.tolist() == [1.0] * 4 for x in done.values)
