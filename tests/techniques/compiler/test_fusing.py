"""What the kernels move that Inductor makes of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.fusing import FusedCosts
from overlaplab.techniques.compiler.predict import predict
from tests.techniques.compiler.making import Making

aten = torch.ops.aten
CHALK = find_hardware("chalk")
MATRIX = 40  # ns to read or to write one on chalk


def moving_ns(graph: Graph, kind: Any = FusedCosts) -> dict[str, int]:
    """What each node takes that runs."""
    costs = kind(CHALK, 1)
    return {n.name: costs(n) for n in graph.nodes if costs(n)}


def test_a_chain_of_elements_reads_once_and_stores_its_end() -> None:
    making = Making()
    x, y = (making.input(name, 100, 100) for name in "xy")
    total = making.call(aten.add.Tensor, x, y, name="total")
    seen = making.call(aten.t.default, total, name="seen")
    relu = making.call(aten.relu.default, seen, name="relu")
    scaled = making.call(aten.mul.Tensor, relu, y, name="scaled")
    graph = making.returning(scaled)

    assert moving_ns(graph) == {"scaled": 3 * MATRIX}
    assert moving_ns(graph, Costs) == {"total": 120, "relu": 80, "scaled": 120}


def test_what_a_matmul_or_the_return_reads_is_stored() -> None:
    making = Making()
    x, w = (making.input(name, 100, 100) for name in "xw")
    active = making.call(aten.relu.default, x, name="active")
    product = making.call(aten.mm.default, active, w, name="product")
    shifted = making.call(aten.add.Tensor, product, active, name="shifted")
    graph = making.returning(shifted, product)

    own = moving_ns(graph)

    assert own["active"] == 2 * MATRIX
    assert own["shifted"] == 3 * MATRIX
    assert own["product"] == moving_ns(graph, Costs)["product"]


def test_two_kernels_that_read_a_value_inside_each_compute_it() -> None:
    making = Making()
    x = making.input("x", 100, 100)
    inside = making.call(aten.exp.default, x, name="inside")
    rows = making.call(aten.sum.dim_IntList, inside, [0], name="rows")
    other = making.call(aten.relu.default, inside, name="other")
    graph = making.returning(rows, other)

    costs = FusedCosts(CHALK, 1)
    facts = {node.name: costs.facts(node) for node in graph.nodes}
    assert not facts["inside"].operator.records
    assert (facts["rows"].read_bytes, facts["rows"].write_bytes) == (40_000, 400)
    assert (facts["other"].read_bytes, facts["other"].write_bytes) == (40_000, 40_000)


def test_of_a_stored_value_a_kernel_reads_the_part_that_it_uses() -> None:
    making = Making()
    x = making.input("x", 100, 100)
    rows = [making.call(aten.slice.Tensor, x, 0, i, i + 10) for i in (0, 5)]
    first = making.call(aten.slice.Tensor, rows[0], 0, 0, 1)
    two = making.call(aten.add.Tensor, *rows)
    some = making.call(aten.add.Tensor, two, first, name="some")
    both = making.call(aten.add.Tensor, x, making.call(aten.t.default, x), name="both")
    graph = making.returning(some, both)

    costs = FusedCosts(CHALK, 1)
    read = {node.name: costs.facts(node).read_bytes for node in graph.nodes}
    assert read["some"] == 4_000 + 4_000 + 400
    assert read["both"] == 40_000  # never more than all of it


def test_a_write_in_place_is_a_kernel_of_its_own() -> None:
    making = Making()
    x = making.input("x", 100, 100)
    copy = making.call(aten.clone.default, x, name="copy")
    making.call(aten.mul_.Tensor, copy, copy, name="write")
    graph = making.returning(copy)

    assert moving_ns(graph) == moving_ns(graph, Costs)


def test_a_prediction_has_a_launch_for_each_kernel() -> None:
    making = Making()
    x = making.input("x", 100, 100)
    for step in range(3):
        x = making.call(aten.relu.default, x, name=f"step{step}")
    graph = making.returning(x)

    found = predict(graph, FusedCosts(CHALK, 1))

    kernels = [(s.name, s.start_ns, s.end_ns) for s in found.spans if s.lane != "cpu"]
    assert kernels == [("relu", 0, 80)]
