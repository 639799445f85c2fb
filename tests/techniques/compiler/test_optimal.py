"""On the virtual clock, no order of a small graph ends before the one that is found."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.dependencies import find_dependencies
from overlaplab.techniques.compiler.graphs import (
    is_launch,
    is_wait,
    launch_of,
    launches,
    sent_bytes,
)
from overlaplab.techniques.compiler.placing import peak_in_flight
from overlaplab.techniques.compiler.predict import predict
from overlaplab.techniques.compiler.scheduling import (
    plan_schedule,
    schedule,
)
from tests.techniques.compiler.making import Making, aten

COSTS = Costs(find_hardware("chalk"), 2)
SIDES = (40, 100, 200)  # matmuls of 0.1 to 16 us, messages of 1.6 to 17 us


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


def least_end(graph: Graph, limit_bytes: int | None = None) -> int:
    """By brute force over all orders, with clocks of its own.

    Without a limit a wait is never better than just before who reads it. With one, each
    message may be waited for at every place, to make room.
    """
    dependencies = find_dependencies(graph)
    nodes = [n for n in graph.nodes if n.op == "call_function" and not is_wait(n)]
    needs = {node: _through_waits(dependencies.needs[node]) for node in nodes}
    best = 10**12
    seen: set[tuple[Any, ...]] = set()

    def go(
        left: list[Node],
        compute: int,
        wire: int,
        ends: dict[Node, int],
        held: set[Node],
    ) -> None:
        nonlocal best
        state = (*left, compute, wire, *ends.items(), *sorted(n.name for n in held))
        if max(compute, wire) >= best or state in seen:
            return  # no order can end before what was computed and sent
        seen.add(state)
        if not left:
            best = max(compute, wire)
            return
        for node in left:
            if any(need in left for need in needs[node]):
                continue
            start = max([compute, *(ends.get(need, 0) for need in needs[node])])
            rest = [other for other in left if other is not node]
            still = held.difference(needs[node])
            if not is_launch(node):
                go(rest, start + COSTS(node), wire, ends, still)
                continue
            flying = {*still, node}
            if limit_bytes is None or sum(map(sent_bytes, flying)) <= limit_bytes:
                end = max(start, wire) + COSTS(node)
                go(rest, start, end, {**ends, node: end}, flying)
        for one in held if limit_bytes is not None else ():
            go(left, max(compute, ends[one]), wire, ends, held - {one})

    go(nodes, 0, 0, {}, set())
    return best


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
def test_nor_does_one_that_keeps_a_limit(seed: int, size: int) -> None:
    graph = graph_of(seed, size)
    limit = max(map(sent_bytes, launches(graph)), default=1)  # the least that will do

    plan = plan_schedule(graph, COSTS, limit_bytes=limit)
    after = schedule(graph, plan, limit_bytes=limit)

    assert end_ns(after) == plan.found.end_ns == least_end(graph, limit)
    assert peak_in_flight(after) <= limit
    assert plan.is_optimal
