"""The facts about a node of an FX graph, by its target and the values in its `meta`.

Values are of any kind that has shapes: fake tensors as AOTAutograd leaves them in
`meta["val"]`, or real ones. Sizes that are symbols count as their hints.
"""

from __future__ import annotations

import operator as python
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from overlaplab.operators.calls import aliased, read, tensors_in, written
from overlaplab.operators.facts import Operator, operator


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the operator of one node does."""

    operator: Operator  # the facts about its overload
    reads: tuple[Node, ...] = ()  # nodes whose values it needs
    # nodes whose values it changes: what aliases them changes, too. Its own result is
    # not among them
    writes: tuple[Node, ...] = ()
    aliases: tuple[Node, ...] = ()  # nodes of whose memory its result is a part
    draws: bool = False  # takes numbers from the random generator
    # read_bytes, write_bytes: of the kernel that CUDA launches, results included; 0
    # where it launches none
    read_bytes: int = 0
    write_bytes: int = 0
    flops: int = 0  # a multiply and an add are two


def node_facts(node: Node) -> NodeFacts:
    """The facts about `node`; placeholders and outputs do nothing.

    Raises:
        ValueError: it, or one of its inputs, has no "val" in its `meta`.
    """
    if node.op != "call_function":
        return NodeFacts(Operator(node.op))
    if node.target is python.getitem:  # one of several results
        source = node.args[0]
        assert isinstance(source, Node)
        return NodeFacts(Operator("getitem"), aliases=(source,))
    owners: dict[int, Node] = {}
    args = map_arg(node.args, lambda n: _value(n, owners))
    kwargs = map_arg(node.kwargs, lambda n: _value(n, owners))
    schema: Any = getattr(node.target, "_schema", None)
    gives = schema is None or bool(schema.returns)  # an update in place may not
    out = _value(node, {}) if gives else None
    facts = operator(node.target)
    writes = written(facts, args, kwargs)
    reads = read(facts, args, kwargs, writes)
    runs = facts.records
    outputs = [] if facts.aliases else tensors_in((out,))  # else they are what it wrote
    flops = 0 if facts.flops is None else facts.flops(args, kwargs, out)
    return NodeFacts(
        facts,
        reads=_nodes(reads, owners) if runs or facts.is_collective else (),
        writes=_nodes(writes, owners),
        aliases=_nodes(aliased(facts, args, kwargs), owners),
        draws=facts.draws and not _without_dropout(node),
        read_bytes=_bytes(reads) if runs else 0,
        write_bytes=_bytes(writes + outputs) if runs else 0,
        flops=_size(flops),
    )


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes of memory that `tensor` covers: what is expanded is there once."""
    covered = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if _size(size) == 0:
            return 0
        if _size(stride):
            covered *= _size(size)
    return covered


def _value(node: Node, owners: dict[int, Node]) -> Any:
    if "val" not in node.meta:
        raise ValueError(
            f"node {node.name!r} has no meta['val'], so nobody knows its shape. Trace "
            "with AOTAutograd or make_fx, or run FakeTensorProp over the graph"
        )
    value = node.meta["val"]
    for tensor in tensors_in((value,)):
        owners[id(tensor)] = node
    return value


def _nodes(tensors: list[torch.Tensor], owners: dict[int, Node]) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(owners[id(tensor)] for tensor in tensors))


def _bytes(tensors: list[torch.Tensor]) -> int:
    each = {id(tensor): tensor for tensor in tensors}
    return sum(map(tensor_bytes, each.values()))


def _size(number: Any) -> int:
    """An integer; of a symbol the value with which its graph was traced."""
    if isinstance(number, torch.SymInt):
        return int(number.node.hint or 0)
    return int(number)


def _without_dropout(node: Node) -> bool:
    """Attention is said to draw, and does where it drops."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == "dropout_p":
            given: Any = node.kwargs.get("dropout_p", argument.default_value)
            if position < len(node.args):
                given = node.args[position]
            return bool(given == 0)
    return False
