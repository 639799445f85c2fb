"""The pass that lets each bucket's update start when its own averages are there.

An optimizer updates all parameters with a few operators on lists ("foreach", "fused"),
which wait for the last average of all. Each of them is divided here: what needs the
same messages stays together, so there is one launch for each bucket instead of one for
each parameter. To be run behind `merge`, in a graph that has the optimizer in it.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.checks import graph_pass
from overlaplab.techniques.compiler.dependencies import find_dependencies
from overlaplab.techniques.compiler.graphs import (
    GraphError,
    chosen,
    copied,
    launches,
    num_elements,
)

Parts = dict[str, list[list[int]]]


def plan_updates(graph: Graph) -> Parts:
    """Which elements of which operator on lists need the same messages.

    Returns:
        The name of each such operator, and its elements in groups, each in their order,
        the group of the first element first.
    """
    lone = copied(graph)
    alone = {
        node.name: _divide(lone, node, [[i] for i in range(num_elements(node))])
        for node in list(lone.nodes)
        if num_elements(node)
    }
    before = find_dependencies(lone).before(launches(lone))
    plan: Parts = {}
    for name, parts in alone.items():
        groups: dict[int, list[int]] = {}
        for index, part in enumerate(parts):
            groups.setdefault(before[part], []).append(index)
        plan[name] = list(groups.values())
    return plan


@graph_pass
def divide_updates(graph: Graph, plan: Parts) -> None:
    """Make an operator of each group of a plan of `plan_updates`.

    Raises:
        GraphError: an element is in no group, or in two; the plan is of another graph.
    """
    if missing := plan.keys() - {node.name for node in graph.nodes}:
        raise GraphError(
            f"the plan names {min(missing)}, which this graph does not have. Plan the "
            "graph that you divide."
        )
    for node in list(graph.nodes):
        groups = plan.get(node.name, ())
        size = num_elements(node)
        if groups and sorted(i for group in groups for i in group) != [*range(size)]:
            raise GraphError(
                f"the plan divides {node.name} into {groups}; expected each of its "
                f"{size} elements once"
            )
        if len(groups) > 1:
            _divide(graph, node, groups)


def _divide(graph: Graph, node: Node, groups: list[list[int]]) -> list[Node]:
    """Replace `node` by one operator for each group."""
    parts = []
    place: dict[int, tuple[Node, int]] = {}  # of each element: where it is now
    with graph.inserting_before(node):
        for group in groups:
            part = graph.create_node(
                "call_function", node.target, *chosen(node, group), node.name
            )
            if isinstance(value := node.meta.get("val"), list | tuple):
                part.meta["val"] = [value[index] for index in group]
            place |= {index: (part, i) for i, index in enumerate(group)}
            parts.append(part)
        for item in list(node.users):
            index = item.args[1]
            assert item.target is operator.getitem and isinstance(index, int)
            item.args = place[index]
    graph.erase_node(node)
    return parts
