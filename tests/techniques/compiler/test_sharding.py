"""Parameters sharded on dimension 0 are gathered, their gradients scattered."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, Node

from overlaplab import streams
from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler import sharding
from overlaplab.techniques.compiler.capture import capture_gradients
from overlaplab.techniques.compiler.compilation import (
    Compilation,
    Settings,
    compile_inserted,
)
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.graphs import GraphError, launches, operation
from overlaplab.techniques.compiler.runtime import load
from overlaplab.techniques.compiler.sharding import insert_shards
from overlaplab.techniques.compiler.simplification import simplify
from tests.ranks import run_untimed

CAP = 1500  # bytes: a layer's


class Net(nn.Module):
    """The last layer has five rows and stays whole; a weight is read transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(12, 24), nn.Linear(24, 12, bias=False)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        x = torch.tanh(x @ self.two.weight) @ self.two.weight.t()
        return self.last(x).square().mean()


SHARDED = {0: "one.weight", 1: "one.bias", 2: "two.weight"}


def batch_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 12, generator=generator)


def inserted(num_ranks: int, **shards: Any) -> Graph:
    graph, gradients = capture_gradients(Net(), batch_of(0))
    return insert_shards(
        simplify(graph), gradients, shards.get("of", SHARDED), "0", num_ranks
    )


@cache
def compiled(num_ranks: int) -> Compilation:
    costs = Costs(find_hardware("chalk"), num_ranks)
    settings = Settings(cap_bytes=CAP, side_stream=num_ranks == 3)
    return compile_inserted(inserted(num_ranks), costs, settings, name="step")


def rows_of(index: int, tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    return tensor.chunk(num_ranks)[rank] if index in SHARDED else tensor


def step(source: str) -> tuple[Tensor, ...]:
    rank, world, device = dist.get_rank(), dist.get_world_size(), streams.device()
    parameters = [p.detach() for p in Net().parameters()]
    mine = [rows_of(i, p, rank, world).to(device) for i, p in enumerate(parameters)]
    side = [streams.Stream()] if "side)" in source else []
    run = load(source, "step", {}).run
    return run([*mine, batch_of(rank).to(device)], dist.group.WORLD, device, *side)


def expected(rank: int, num_ranks: int) -> list[Tensor]:
    """In one process: the rank's loss, and its rows of the averages."""
    net = Net()
    losses = [net(batch_of(r)).detach() for r in range(num_ranks)]
    total: Any = None
    for r in range(num_ranks):
        own = torch.autograd.grad(net(batch_of(r)), list(net.parameters()))
        total = own if total is None else [*map(torch.add, total, own)]
    averages = [t / num_ranks for t in total]
    rows = [rows_of(i, a, rank, num_ranks) for i, a in enumerate(averages)]
    return [losses[rank], *rows]


@pytest.mark.parametrize(
    ("cluster", "num_ranks"),
    [*(("virtual", n) for n in (1, 2, 3, 4)), ("gloo", 2)],
)
def test_a_rank_has_its_rows_of_what_one_process_has(
    cluster: str, num_ranks: int
) -> None:
    source = compiled(num_ranks).code.source

    run = run_untimed(step, source, cluster=cluster, world_size=num_ranks)

    assert run.warnings == ()
    for rank, values in enumerate(run.values):
        right = expected(rank, num_ranks)
        torch.testing.assert_close(list(values), right, rtol=0, atol=0)


def test_what_is_whole_is_all_reduced_and_what_is_sharded_scattered() -> None:
    sent = [operation(launch) for launch in launches(inserted(2))]

    assert sent[:3] == ["all_gather_into_tensor"] * 3
    assert sorted(sent[3:]) == ["all_reduce"] * 2 + ["reduce_scatter_tensor"] * 3


def test_gathers_and_scatters_travel_in_buckets_of_their_own() -> None:
    kinds = [(m.kind[0], len(m.launches)) for m in compiled(2).merges]

    assert kinds == [
        ("all_gather_into_tensor", 2),
        ("all_gather_into_tensor", 1),
        ("all_reduce", 2),
        ("reduce_scatter_tensor", 1),
        ("reduce_scatter_tensor", 2),
    ]


def test_rows_that_ranks_cannot_divide_are_refused() -> None:
    with pytest.raises(ValueError) as refusal:
        inserted(2, of={3: "last.weight"})

    assert str(refusal.value) == (
        "last.weight has the shape (5, 12), and 2 ranks shard dimension 0; expected "
        "rows that 2 divides. Leave it whole."
    )


def no_division(graph: Graph, gradient: Node, *args: Any) -> Node:
    return REAL["_scattered"](graph, gradient, *args).all_input_nodes[0]


def another_gradient(graph: Graph, gradient: Node, *args: Any) -> Node:
    scattered = REAL["_scattered"](graph, gradient, *args)
    launch = scattered.all_input_nodes[0].all_input_nodes[0]
    launch.replace_input_with(gradient, gradient.all_input_nodes[0])
    return scattered


def another_group(graph: Graph, *args: Any) -> Node:
    wait = REAL["_gathered"](graph, *args)
    launch = wait.all_input_nodes[0]
    launch.args = (*launch.args[:-1], "1")
    return wait


def the_shard_itself(graph: Graph, shard: Node, *args: Any) -> Node:
    wait = REAL["_gathered"](graph, shard, *args)
    wait.replace_all_uses_with(shard)
    return wait


REAL = {name: getattr(sharding, name) for name in ("_scattered", "_gathered")}
WRONG = {
    no_division: ("_scattered", "is not what it was"),
    another_gradient: ("_scattered", "3 are not sent any more, 3 are new"),
    another_group: ("_gathered", "are not sent any more"),
    the_shard_itself: ("_gathered", "are not sent any more"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.__name__)
def test_a_wrong_insertion_is_refused(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, message = WRONG[wrong]
    monkeypatch.setattr(sharding, name, wrong)

    with pytest.raises(GraphError, match=message):
        inserted(2)
