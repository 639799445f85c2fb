"""The pass that puts communication in where parameters are sharded on dimension 0.

The graph is given this rank's rows of such a parameter. An all-gather makes it whole
before anybody reads it, and a reduce-scatter leaves this rank's rows of the average of
its gradient, as ZeRO does; what is whole on every rank is all-reduced. A gathered
parameter lives to its last use, or is given up after the forward, see `regathering`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.checks import check_same
from overlaplab.techniques.compiler.graphs import (
    FUNCTIONAL,
    add_behind,
    copied,
    returned,
)
from overlaplab.techniques.compiler.insertion import (
    all_reduced,
    check_positions,
    expected_averages,
    identifier,
    name_gradients,
    return_reduced,
)
from overlaplab.techniques.compiler.meaning import Meaning, Numbers, Value, meaning
from overlaplab.techniques.compiler.regathering import gather_again

_GATHER = FUNCTIONAL.all_gather_into_tensor.default
_SCATTER = FUNCTIONAL.reduce_scatter_tensor.default
_WAIT = FUNCTIONAL.wait_tensor.default
_DIVIDE = torch.ops.aten.div.Scalar


def insert_shards(
    graph: Graph,
    gradients: Mapping[int, str],
    shards: Mapping[int, str],
    group: str,
    num_ranks: int,
    *,
    again: bool = False,
    ahead_bytes: int | None = None,
) -> Graph:
    """Gather the parameters that are sharded, scatter their gradients.

    Nothing overlaps yet, and each is a message of its own, as in `insert_all_reduces`.

    Args:
        graph: forward and backward in one, of whole parameters.
        gradients: position in what it returns -> name of the parameter.
        shards: position among the inputs -> name, of those that are sharded; each has
            as many rows as `num_ranks` divides.
        group: name of the process group.
        num_ranks: its size.
        again: whether parameters are given up after the forward, and gathered a second
            time where the backward reads them: fewer are whole at a time (`peak_whole`
            says how many bytes), and more travels.
        ahead_bytes: with `again`, that may be gathered before they are read; None:
            twice the largest parameter.

    Returns:
        A new graph, which takes this rank's rows of each sharded parameter and returns
        this rank's rows of its averaged gradient.

    Raises:
        GraphError: it would change anything else.
        ValueError: a parameter cannot be divided, or is not where `shards` says.
        TypeError: see `check_positions`; `num_ranks` is no whole number.
    """
    check_positions(graph, gradients)
    _check_shards(graph, gradients, shards, num_ranks)
    after = copied(graph, name_gradients(graph, gradients))
    inputs = [node for node in after.nodes if node.op == "placeholder"]
    last, wholes = inputs[-1], {}
    for position, name in shards.items():
        last = _gathered(after, inputs[position], name, last, (num_ranks, group))
        wholes[last] = position
    results = returned(after)
    twice: list[int] = []
    if again:
        ends = [v for p, v in enumerate(results) if p not in gradients]
        ends = [value for value in ends if isinstance(value, Node)]
        found = gather_again(after, list(wholes), ends, ahead_bytes)
        twice = [wholes[whole] for whole in found]

    def reduced(gradient: Node, name: str) -> Node:
        if name in shards.values():
            return _scattered(after, gradient, name, num_ranks, group)
        return all_reduced(after, gradient, name, group)

    return_reduced(after, gradients, reduced)
    check_same(
        graph,
        after,
        what="insert_shards",
        expected=lambda _, numbers: _expected(
            graph, numbers, gradients, shards, group, num_ranks, twice
        ),
    )
    return after


def _check_shards(
    graph: Graph,
    gradients: Mapping[int, str],
    shards: Mapping[int, str],
    num_ranks: int,
) -> None:
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise TypeError(f"num_ranks is {num_ranks!r}; expected a whole number")
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; expected at least 1")
    if not isinstance(shards, Mapping):
        raise TypeError(
            f"shards is {shards!r}; expected names by position, such as "
            "{0: 'layer.weight'}"
        )
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    shapes = {
        name: returned(graph)[position].meta["val"].shape
        for position, name in gradients.items()
        if isinstance(returned(graph)[position], Node)
    }
    for position, name in shards.items():
        if position not in range(len(inputs)):
            raise ValueError(
                f"shards has {name} at {position!r}, and the graph takes {len(inputs)} "
                f"inputs; expected a position from 0 to {len(inputs) - 1}"
            )
        whole = inputs[position].meta["val"].shape
        if shapes.get(name, whole) != whole:
            raise ValueError(
                f"input {position} has the shape {tuple(whole)}, and the gradient of "
                f"{name} {tuple(shapes[name])}; expected the position of {name}"
            )
    names = list(shards.values())
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"shards has {twice[0]} twice; expected each parameter once")


def _gathered(
    graph: Graph, shard: Node, name: str, place: Node, where: tuple[int, str]
) -> Node:
    whole: Any = shard.meta["val"]
    num_ranks, group = where
    rows = whole.shape[0] if whole.dim() else 0
    if not rows or rows % num_ranks:
        raise ValueError(
            f"{name} has the shape {tuple(whole.shape)}, and {num_ranks} ranks shard "
            f"dimension 0; expected rows that {num_ranks} divides. Leave it whole."
        )
    shard.meta = shard.meta | {
        "val": whole.new_empty((rows // num_ranks, *whole.shape[1:]))
    }
    own = identifier(name)
    value = whole.new_empty(whole.shape)
    sent = (shard, num_ranks, group)
    launch = add_behind(place, _GATHER, sent, f"gather_{own}", value)
    wait = add_behind(launch, _WAIT, (launch,), f"whole_{own}", value)
    shard.replace_all_uses_with(wait, lambda user: user is not launch)
    return wait


def _scattered(
    graph: Graph, gradient: Node, name: str, num_ranks: int, group: str
) -> Node:
    own = identifier(name)
    whole: Any = gradient.meta["val"]
    part = whole.new_empty((whole.shape[0] // num_ranks, *whole.shape[1:]))
    sent = (gradient, "sum", num_ranks, group)
    launch = add_behind(gradient, _SCATTER, sent, f"scatter_{own}", part)
    total = add_behind(launch, _WAIT, (launch,), f"sum_{own}", part)
    return add_behind(total, _DIVIDE, (total, num_ranks), f"average_{own}", part)


def _expected(
    graph: Graph,
    numbers: Numbers,
    gradients: Mapping[int, str],
    shards: Mapping[int, str],
    group: str,
    num_ranks: int,
    twice: Sequence[int],
) -> Meaning:
    """All is computed from gathered inputs; rows of averages are returned.

    Inputs at the positions `twice` are gathered a second time.
    """
    example = Graph()
    sent = example.placeholder("sent")
    gather = example.call_function(_GATHER, (sent, num_ranks, group))
    scatter = example.call_function(_SCATTER, (sent, "sum", num_ranks, group))
    whole = meaning(graph, numbers, dict.fromkeys(shards, gather))
    inputs = list(whole.inputs)
    for position in shards:
        inputs[position] = numbers.of("placeholder", 1 + position)
    results = returned(graph)
    returns, messages = list(whole.returns), whole.messages.copy()
    for position in twice:
        messages[numbers.reduced(gather, numbers.read(inputs[position]))] += 1
    scattered: set[Node] = set()
    for position, name in gradients.items():
        gradient = results[position]
        if name in shards.values() and isinstance(gradient, Node):
            reduced = numbers.reduced(scatter, whole.returns[position])
            average = numbers.call(_DIVIDE, Value(numbers.read(reduced)), num_ranks)
            returns[position] = numbers.read(average)
            messages[reduced] += gradient not in scattered
            scattered.add(gradient)
    others = {p: n for p, n in gradients.items() if n not in shards.values()}
    changed = replace(whole, returns=returns, inputs=inputs, messages=messages)
    return expected_averages(changed, numbers, results, others, group)
