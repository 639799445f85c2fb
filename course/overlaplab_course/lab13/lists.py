"""What could run beside a message: by lists that readers meet, and in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.fx import Graph, Node

from overlaplab.techniques.compiler import find_dependencies, nine_operators
from overlaplab_course import stored
from overlaplab_course.lab13 import graphs
from overlaplab_course.lab13.graphs import Needs
from overlaplab_course.lab13.thesis import BATCHES, costs_of, gpt_graph

Ask = Callable[[Graph, Needs, Node], Iterable[Any]]
# By the module whose backward pass an operator is of.
HIDES_A_MESSAGE = {"Linear": True, "LayerNorm": False, "GELU": False, "Dropout": False}


def by_type(graph: Graph, needs: Needs, launch: Node) -> list[Node]:
    """Whatever is of a Linear: here every operator is."""
    return [n for n in graphs.operators(graph) if HIDES_A_MESSAGE[_module(n)]]


def _module(node: Node) -> str:
    return "Linear"  # all that `nine_operators` has


def by_layer(graph: Graph, needs: Needs, launch: Node) -> list[Node]:
    """Whatever is of a layer below the one whose gradient is sent."""
    sent = _layer(launch)
    return [n for n in graphs.operators(graph) if _layer(n) < sent]


def _layer(node: Node) -> int:
    return int(node.name[-1])


def said(ask: Ask) -> dict[tuple[str, str], bool]:
    """Of each message and operator of the nine-operator graph, what `ask` says."""
    graph = nine_operators()
    needs = graphs.needs_of(graph)
    found = {}
    for launch in graphs.launches(graph):
        named = {node.name for node in ask(graph, needs, launch)}
        for node in graphs.operators(graph):
            found[launch.name, node.name] = node.name in named
    return found


def _truth(graph: Graph, needs: Needs, launch: Node) -> list[Node]:
    before = graphs.all_before(needs, launch)
    return [
        n
        for n in graphs.operators(graph)
        if n not in before and launch not in graphs.all_before(needs, n)
    ]


def table_of(answers: Mapping[str, Ask]) -> str:
    """A row for each message and each list, a column for each operator."""
    names = [node.name for node in graphs.operators(nine_operators())]
    messages = [node.name for node in graphs.launches(nine_operators())]
    each = {name: said(ask) for name, ask in answers.items()}
    rows = [
        (message, name, *("yes" if each[name][message, op] else "-" for op in names))
        for message in messages
        for name in answers
    ]
    return stored.text_table(("beside", "says", *names), rows)


def count_wrong(ask: Ask) -> tuple[int, int]:
    """How many answers about the nine operators allow too much, and miss something."""
    mine, right = said(ask), said(_truth)
    allowed = sum(mine[key] and not right[key] for key in right)
    return allowed, sum(right[key] and not mine[key] for key in right)


def wrong_of(answers: Mapping[str, Ask]) -> str:
    """How often each is wrong, and how."""
    number = len(said(_truth))
    lines = []
    for name, ask in answers.items():
        allowed, missed = count_wrong(ask)
        lines.append(
            f"{name}: of {number} answers {allowed} allow what cannot be, "
            f"{missed} miss what could"
        )
    return "\n".join(lines)


def by_type_on_a_gpt() -> str:
    """What "a Linear's products hide messages" says of a captured graph."""
    graph, costs = gpt_graph(BATCHES[0]), costs_of("NVLink")
    dependencies = find_dependencies(graph)
    sent = graphs.launches(graph)
    before, behind = dependencies.before(sent), dependencies.behind(sent)
    allowed = answers = 0
    independent_ns = missed_ns = 0
    computing = graphs.operators(graph)
    for i in range(len(sent)):
        for node in computing:
            is_free = not (before[node] | behind[node]) >> i & 1
            is_product = str(node.target).startswith(("aten.mm", "aten.addmm"))
            answers += 1
            allowed += is_product and not is_free
            independent_ns += is_free * costs(node)
            missed_ns += (is_free and not is_product) * costs(node)
    return (
        f"{len(sent)} messages, {len(computing)} operators: by type "
        f"{100 * allowed / answers:.0f} % of the answers allow what cannot be,\n"
        f"and {100 * missed_ns / independent_ns:.0f} % of the time that could run "
        "beside a message is missed"
    )
