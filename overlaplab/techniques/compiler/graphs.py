"""Graphs of operators with collectives in them: what a node is, and how to print it.

A collective is two nodes, as torch's functional collectives are: the *launch*, whose
result nobody may read yet, and for each tensor of it a *wait*, whose result anybody
may. A launch of several tensors gives a list, so a `getitem` stands between.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from overlaplab.errors import OverlaplabError
from overlaplab.operators import (
    COLLECTIVES,
    NodeFacts,
    dtype_name,
    node_facts,
    tensor_bytes,
    tensors_in,
)

COALESCED = "_coalesced"
FUNCTIONAL: Any = getattr(torch.ops, COLLECTIVES)
_FACTS = "overlaplab facts"  # in a node's meta: its inputs, and what they make of it
HELD_BEHIND = "overlaplab held behind"  # in a launch's meta: names of nodes
_WAIT = FUNCTIONAL.wait_tensor.default


class GraphError(OverlaplabError):
    """A pass would change what a graph computes, sends or waits for."""


def check_graph(graph: object) -> None:
    """Refuse what is no graph, such as the module around one.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(graph, Graph):
        own = " Give its .graph." if hasattr(graph, "graph") else ""
        raise TypeError(
            f"graph is a {type(graph).__name__}; expected a torch.fx.Graph.{own}"
        )


def is_wait(node: Node) -> bool:
    """Does `node` wait for a tensor of a collective?"""
    return node.target is _WAIT


def is_launch(node: Node) -> bool:
    """Does `node` launch a collective?"""
    return (
        node.op == "call_function"
        and getattr(node.target, "namespace", "") == COLLECTIVES
        and node.target is not _WAIT
    )


def launches(graph: Graph) -> list[Node]:
    """The collectives of a graph, in its order."""
    return [node for node in graph.nodes if is_launch(node)]


def operation(launch: Node) -> str:
    """ "all_reduce", whether it is coalesced or not."""
    target: Any = launch.target
    name: str = target._schema.name.split("::")[1]
    return name.removesuffix(COALESCED)


def payload(launch: Node) -> list[Node]:
    """The tensors that a launch sends."""
    first: Any = launch.args[0]
    return list(first) if isinstance(first, list | tuple) else [first]


def group_of(launch: Node) -> str:
    """The name of the process group, always the last argument."""
    return str(launch.args[-1])


def results(launch: Node) -> list[Node]:
    """What carries the result before its wait: the launch, or its `getitem`s."""
    if len(payload(launch)) == 1 and not is_coalesced(launch):
        return [launch]
    return [user for user in launch.users if is_item(user)]


def waits(launch: Node) -> list[Node]:
    """The waits of a launch, one for each tensor."""
    return [u for result in results(launch) for u in result.users if is_wait(u)]


def launch_of(wait: Node) -> Node:
    """What a wait waits for: the launch, behind a `getitem` or not."""
    launch: Node = wait.all_input_nodes[0]
    return launch.all_input_nodes[0] if is_item(launch) else launch


def is_coalesced(launch: Node) -> bool:
    """Does it send a list of tensors?"""
    return isinstance(launch.args[0], list | tuple)


def num_elements(node: Node) -> int:
    """Of an operator that treats each element of its lists alone; else 0."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.removeprefix("aten::") if schema else ""
    if not name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adag")):
        return 0
    first = node.args[0] if node.args else None
    return len(first) if isinstance(first, list | tuple) else 0


def chosen(
    node: Node, indices: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of such an operator for some of its elements.

    Lists of another length, as empty ones, are what all elements share.
    """
    size = num_elements(node)

    def of(value: Any) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) == size
        return [value[i] for i in indices] if is_list else value

    args = tuple(map(of, node.args))
    return args, {name: of(value) for name, value in node.kwargs.items()}


def is_item(node: Node) -> bool:
    """Does it take one of several results?"""
    return node.target is operator.getitem


def is_view(node: Node) -> bool:
    """Does it show memory that is there, and launch nothing?"""
    if node.op != "call_function":
        return False
    facts = facts_of(node)
    return bool(facts.aliases) and not facts.operator.records and not facts.writes


def output_of(graph: Graph) -> Node:
    """The node that returns."""
    last: Node = next(iter(reversed(graph.nodes)))
    return last


def returned(graph: Graph) -> list[Any]:
    """What a graph returns, in order: nodes, and what is None or a number."""
    return _returned(output_of(graph))


def _returned(output: Node) -> list[Any]:
    values: Any = output.args[0]
    return list(values) if isinstance(values, list | tuple) else [values]


def node_bytes(nodes: Iterable[Node]) -> int:
    """Of the tensors that `nodes` give."""
    values = (node.meta.get("val") for node in nodes)
    return sum(map(tensor_bytes, tensors_in(values)))


def sent_bytes(launch: Node) -> int:
    """As `hardware.collective_ns` counts: gathered sizes are those of the result."""
    if operation(launch).startswith("all_gather"):
        return node_bytes([launch])
    return node_bytes(payload(launch))


def copied(graph: Graph, names: Mapping[Node, str] | None = None) -> Graph:
    """A graph of the same nodes, with their facts; the old one stays.

    Args:
        graph: what is copied.
        names: of nodes that are called otherwise in the copy, if they are free there.
    """
    new = Graph(graph.owning_module)
    old_output = output_of(graph)
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node is not old_output:
            args = map_arg(node.args, lambda n: made[n])
            kwargs = map_arg(node.kwargs, lambda n: made[n])
            name = (names or {}).get(node, node.name)
            made[node] = new.create_node(node.op, node.target, args, kwargs, name)
            made[node].meta = dict(node.meta)
            _carry_facts(node, made)
    output = new.output(map_arg(old_output.args[0], lambda n: made[n]))
    output.meta = dict(old_output.meta)
    return new


def facts_of(node: Node) -> NodeFacts:
    """`overlaplab.operators.node_facts`, worked out once while a node's inputs stay."""
    known: Any = node.meta.get(_FACTS)
    if known is None or known[0] is not node.args:
        known = node.meta[_FACTS] = (node.args, node_facts(node))
    facts: NodeFacts = known[1]
    return facts


def _carry_facts(node: Node, made: Mapping[Node, Node]) -> None:
    known: Any = node.meta.get(_FACTS)
    if known is None or known[0] is not node.args:
        made[node].meta.pop(_FACTS, None)
        return
    facts = replace(
        known[1],
        reads=tuple(made[n] for n in known[1].reads),
        writes=tuple(made[n] for n in known[1].writes),
        aliases=tuple(made[n] for n in known[1].aliases),
    )
    made[node].meta[_FACTS] = (made[node].args, facts)


def add_behind(
    place: Node, target: Any, args: tuple[Any, ...], name: str, value: Any
) -> Node:
    """A new call right behind `place`, which gives what `value` looks like."""
    with place.graph.inserting_after(place):
        node = place.graph.create_node("call_function", target, args, name=name)
    node.meta["val"] = value
    return node


def reorder(graph: Graph, order: Iterable[Node]) -> None:
    """Put the nodes of `graph` into `order`; the output stays last."""
    last = output_of(graph)
    for node in order:
        if node is not last:
            last.prepend(node)


def show(graph: Graph) -> str:
    """A line for each node: what it gives, from what, and its shape.

    Collectives are marked: `>>` where one is launched, `<<` where it is waited for.
    """
    return "\n".join(_lines(graph))


def _lines(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "output":
            given = _returned(node)  # a pass may have left another node behind it
            names = (v.name if isinstance(v, Node) else str(v) for v in given)
            yield f"   return {', '.join(names)}"
            continue
        mark = ">>" if is_launch(node) else "<<" if is_wait(node) else "  "
        if node.op == "placeholder":
            made = "input"
        else:
            args = ", ".join(map(_text, (*node.args, *node.kwargs.values())))
            made = f"{target_name(node)}({args})"
        yield f"{mark} {node.name} = {made}{_note(node)}"


def target_name(node: Node) -> str:
    """ "mm", without namespace and overload."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name.split("::")[1])
    return str(getattr(target, "__name__", target))


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _note(node: Node) -> str:
    if is_launch(node):
        decided = node.meta.get("decision")
        return f"   # {sent_bytes(node):,} bytes" + (f"; {decided}" if decided else "")
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    shape = ", ".join(map(str, value.shape))
    return f"   # ({shape}) {dtype_name(value.dtype)}"
