"""Random graphs give the same values after every pass, and after all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule

import overlaplab as ol
from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler.bucketing import merge, plan_merges
from overlaplab.techniques.compiler.codegen import generate
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.decision import decide, plan_decisions
from overlaplab.techniques.compiler.dependencies import (
    find_dependencies,
    sorted_by,
)
from overlaplab.techniques.compiler.graphs import copied, launches, reorder
from overlaplab.techniques.compiler.placing import peak_in_flight
from overlaplab.techniques.compiler.scheduling import (
    plan_schedule,
    schedule,
)
from overlaplab.techniques.compiler.side_stream import plan_streams
from overlaplab.techniques.compiler.simplification import simplify
from tests.ranks import run_untimed
from tests.techniques.compiler.making import random_graph, run

COSTS = Costs(find_hardware("chalk"), 2)
LIMIT = 80  # two matrices of 3 x 3 floats


def decided(graph: Graph) -> Graph:
    return decide(graph, plan_decisions(graph, COSTS, least_gain_ns=1))


def merged(graph: Graph) -> Graph:
    return merge(graph, plan_merges(graph, 2 * 36))


def scheduled(graph: Graph) -> Graph:
    return schedule(graph, plan_schedule(graph, COSTS, max_states=300))


def limited(graph: Graph) -> Graph:
    plan = plan_schedule(graph, COSTS, limit_bytes=LIMIT, max_states=300)
    return schedule(graph, plan, limit_bytes=LIMIT)


def everything(graph: Graph) -> Graph:
    return limited(decided(merged(simplify(graph))))


PASSES = [simplify, merged, decided, scheduled, limited, everything]


@pytest.mark.parametrize("run_pass", PASSES, ids=lambda p: p.__name__)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 16))
@settings(max_examples=60, deadline=None)
def test_a_random_graph_gives_the_same_values(run_pass, seed: int, size: int) -> None:
    graph = random_graph(seed, size)

    after = run_pass(graph)

    torch.testing.assert_close(run(after), run(graph), rtol=0, atol=0, equal_nan=True)
    after.lint()


@given(seed=st.integers(0, 10**6), size=st.integers(2, 16))
@settings(max_examples=60, deadline=None)
def test_any_order_that_the_dependencies_allow_gives_the_same_values(
    seed: int, size: int
) -> None:
    graph = random_graph(seed, size)
    dependencies = find_dependencies(graph)
    expected = run(graph)
    last_first = {node: -i for i, node in enumerate(dependencies.nodes)}
    inputs = {n: float("-inf") for n in dependencies.nodes if n.op == "placeholder"}

    reorder(graph, sorted_by(dependencies.needs, last_first | inputs))

    torch.testing.assert_close(run(graph), expected, rtol=0, atol=0, equal_nan=True)


@given(seed=st.integers(0, 10**6), size=st.integers(2, 16))
@settings(max_examples=40, deadline=None)
def test_no_place_of_a_limited_graph_has_more_in_flight(seed: int, size: int) -> None:
    graph = limited(random_graph(seed, size))

    assert peak_in_flight(graph) <= LIMIT
    assert len(launches(graph)) == len(launches(random_graph(seed, size)))


def values_of_both(graph: Graph, has_side: bool) -> tuple[Any, Any]:
    """What the graph gives and leaves as it stands, and the code of all passes."""

    def ran(run: Any) -> list[Any]:
        torch.manual_seed(dist.get_rank())
        inputs = [torch.randn(3, 3, device=ol.device()) for _ in range(3)]
        results = [*run(list(inputs)), *inputs]
        return [v if v is None else v.clone() for v in results]

    after = everything(graph)
    plan = plan_streams(after) if has_side else None
    code = generate(after, "step", plan).run
    more = (ol.streams.Stream(),) if has_side else ()
    module = GraphModule(nn.Module(), copied(graph))
    return (
        ran(lambda args: module(*args)),
        ran(lambda args: code(args, dist.group.WORLD, ol.device(), *more)),
    )


@given(seed=st.integers(0, 10**6), size=st.integers(2, 16), has_side=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_code_of_a_random_graph_gives_the_same_values(
    seed: int, size: int, has_side: bool
) -> None:
    """On ranks: averages are made in place, and memory is let go on two streams."""
    run = run_untimed(values_of_both, random_graph(seed, size), has_side)

    assert run.warnings == ()
    for expected, found in run.values:
        torch.testing.assert_close(found, expected, equal_nan=True)
