"""On the virtual clock, no order of a small graph ends before the one that is found."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.dependencies import find_dependencies
from overlaplab.techniques.compiler.graphs import is_launch, is_wait, launch_of
from overlaplab.techniques.compiler.placing import peak_in_flight
from overlaplab.techniques.compiler.predict import predict
from overlaplab.techniques.compiler.scheduling import (
    plan_schedule,
    schedule,
)
from tests.techniques.compiler.making import Making, aten

COSTS = Costs(find_hardware("chalk"), 2)
SIDES = (40, 60, 100)  # matmuls of 0.1 to 2 us, messages of 1.6 to 5 us


def graph_of(seed: int, num_operators: int) -> Graph:
    """Matmuls of square matrices and messages with them, some of which are read."""
    draw = random.Random(seed)
    m = Making()
    values = {side: [m.input(f"x{side}", side, side)] for side in SIDES}
    results: list[Node] = []
    for _ in range(num_operators):
        side = draw.choice(SIDES)
        if draw.random() < 0.4:
            wait = m.wait(m.launch(draw.choice(values[side])))
            results.append(wait)
            if draw.random() < 0.4:
                values[side].append(wait)
        else:
            one, other = draw.choice(values[side]), draw.choice(values[side])
            made = m.call(aten.mm.default, one, other)
            results.append(made)
            values[side].append(made)
    return m.returning(*results)


def end_ns(graph: Graph) -> int:
    return max((span.end_ns for span in predict(graph, COSTS).spans), default=0)


def least_end(graph: Graph) -> int:
    """By brute force over all orders, with clocks of its own.

    Without a limit a wait is never better than just before who reads it.
    """
    dependencies = find_dependencies(graph)
    nodes = [n for n in graph.nodes if n.op == "call_function" and not is_wait(n)]
    needs = {node: _through_waits(dependencies.needs[node]) for node in nodes}

    def go(left: list[Node], compute: int, wire: int, ends: dict[Node, int]) -> int:
        if not left:
            return max(compute, wire)
        best = 10**12
        for node in left:
            if any(need in left for need in needs[node]):
                continue
            start = max([compute, *(ends.get(need, 0) for need in needs[node])])
            rest = [other for other in left if other is not node]
            if is_launch(node):
                end = max(start, wire) + COSTS(node)
                best = min(best, go(rest, start, end, {**ends, node: end}))
            else:
                best = min(best, go(rest, start + COSTS(node), wire, ends))
        return best

    return go(nodes, 0, 0, {})


def _through_waits(needs: Iterable[Node]) -> list[Node]:
    return [launch_of(need) if is_wait(need) else need for need in needs]


@given(seed=st.integers(0, 10**6), size=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_no_order_of_a_small_graph_ends_earlier(seed: int, size: int) -> None:
    graph = graph_of(seed, size)

    plan = plan_schedule(graph, COSTS)
    after = schedule(graph, plan)

    assert end_ns(after) == plan.found.end_ns == least_end(graph)
    assert plan.is_optimal


@given(seed=st.integers(0, 10**6), size=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_under_a_limit_a_graph_ends_when_its_problem_does(seed: int, size: int) -> None:
    graph, limit = graph_of(seed, size), 4 * 100 * 100

    plan = plan_schedule(graph, COSTS, limit_bytes=limit)
    after = schedule(graph, plan, limit_bytes=limit)

    # That no order of the problem ends earlier is in test_search.py.
    assert end_ns(after) == plan.found.end_ns
    assert peak_in_flight(after) <= limit
    assert plan.is_optimal
