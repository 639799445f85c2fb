"""The pass that puts communication in: gradients leave a graph as averages.

Behind each gradient that a backward graph returns it puts an all-reduce and its wait,
and returns what the wait gives. A gradient that is returned twice travels once; what is
no parameter's gradient stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.checks import check_same
from overlaplab.techniques.compiler.graphs import (
    FUNCTIONAL,
    add_behind,
    check_graph,
    copied,
    is_launch,
    operation,
    output_of,
    returned,
)
from overlaplab.techniques.compiler.meaning import (
    Meaning,
    Numbers,
)

AVERAGE = "avg"


def is_average(node: Node) -> bool:
    """Does `node` launch an average over ranks, which generated code makes in place?"""
    return (
        is_launch(node) and operation(node) == "all_reduce" and node.args[1] == AVERAGE
    )


def insert_all_reduces(graph: Graph, gradients: Mapping[int, str], group: str) -> Graph:
    """All-reduce the gradients of a graph, each as soon as it is there, and wait.

    Nothing overlaps yet, and each is a message of its own: buckets and order are other
    passes.

    Args:
        graph: a backward pass.
        gradients: position in what it returns -> name of the parameter. None is no
            gradient there, and stays.
        group: name of the process group.

    Returns:
        A new graph, in which gradients have names and are averages over the ranks.

    Raises:
        GraphError: it would change anything else.
        ValueError, TypeError: see `check_positions`.
    """
    check_positions(graph, gradients)
    after = copied(graph, name_gradients(graph, gradients))
    return_reduced(after, gradients, lambda g, name: all_reduced(after, g, name, group))

    def expected(old: Meaning, numbers: Numbers) -> Meaning:
        return expected_averages(old, numbers, returned(graph), gradients, group)

    check_same(graph, after, what="insert_all_reduces", expected=expected)
    return after


def check_positions(graph: Graph, gradients: Mapping[int, str]) -> None:
    """Refuse gradients that a graph does not return, and sparse ones.

    Raises:
        TypeError: `graph` is none, `gradients` no names by position, or one is sparse.
        ValueError: a position is not there.
    """
    check_graph(graph)
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"gradients is {gradients!r}; expected names by position, such as "
            "{1: 'layer.weight'}"
        )
    results = returned(graph)
    number = len(results)
    for position, name in gradients.items():
        if position not in range(number):
            raise ValueError(
                f"gradients has {name} at {position!r}, and the graph returns {number} "
                f"values; expected a position from 0 to {number - 1}"
            )
        gradient = results[position]
        layout = gradient.meta["val"].layout if isinstance(gradient, Node) else None
        if layout not in (None, torch.strided):
            raise TypeError(
                f"the gradient of {name} has layout {layout}; only dense gradients are "
                "averaged. Use sparse=False in its module, and to send of a table what "
                "was looked up, backend(embedding_rows=...)."
            )


def name_gradients(graph: Graph, gradients: Mapping[int, str]) -> dict[Node, str]:
    """What gradients are called in a copy of a graph."""
    names: dict[Node, str] = {}
    for position, name in gradients.items():
        gradient = returned(graph)[position]
        if isinstance(gradient, Node) and gradient.op == "call_function":
            names.setdefault(gradient, f"grad_{identifier(name)}")
    return names


def return_reduced(
    graph: Graph, gradients: Mapping[int, str], reduced: Callable[[Node, str], Node]
) -> None:
    """Return what `reduced` makes of each gradient and its name, of each once."""
    results = returned(graph)
    made: dict[Node, Node] = {}
    for position, name in gradients.items():
        gradient = results[position]
        if isinstance(gradient, Node):
            if gradient not in made:
                made[gradient] = reduced(gradient, name)
            results[position] = made[gradient]
    output_of(graph).args = (tuple(results),)


def all_reduced(graph: Graph, gradient: Node, name: str, group: str) -> Node:
    """Put an all-reduce and its wait behind a gradient; returns the wait."""
    place = gradient
    if gradient.op == "placeholder":  # inputs stay in front
        place = [n for n in graph.nodes if n.op == "placeholder"][-1]
    own, value = identifier(name), gradient.meta["val"]
    value = value.new_empty(value.shape)
    reduce, wait = FUNCTIONAL.all_reduce.default, FUNCTIONAL.wait_tensor.default
    sent = (gradient, AVERAGE, group)
    launch = add_behind(place, reduce, sent, f"all_reduce_{own}", value)
    return add_behind(launch, wait, (launch,), f"average_{own}", value)


def expected_averages(
    old: Meaning,
    numbers: Numbers,
    results: Sequence[Any],
    gradients: Mapping[int, str],
    group: str,
) -> Meaning:
    """The average of each gradient is returned and sent once, all else as it was."""
    example = Graph()
    sent = example.placeholder("sent")
    launch = example.call_function(
        FUNCTIONAL.all_reduce.default, (sent, AVERAGE, group)
    )
    returns, messages = list(old.returns), old.messages.copy()
    travelled: set[Node] = set()
    for position in gradients:
        gradient = results[position]
        if isinstance(gradient, Node):
            reduced = numbers.reduced(launch, old.returns[position])
            returns[position] = numbers.read(reduced)
            messages[reduced] += gradient not in travelled
            travelled.add(gradient)
    return replace(old, returns=returns, messages=messages)


def identifier(name: str) -> str:
    """A parameter's name as a part of a variable's."""
    return "".join(c if c.isalnum() else "_" for c in name)
