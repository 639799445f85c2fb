"""Graphs by hand and at random, and their values without any cluster.

A message of these values takes what it sends when it is waited for and its result is
poison until then, so a pass that lets anybody read or write too early changes a value.
"""

from __future__ import annotations

import operator
import random
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.graphs import (
    FUNCTIONAL,
    is_item,
    is_launch,
    is_wait,
    launch_of,
    operation,
    payload,
    returned,
)

aten = torch.ops.aten
GROUP = "0"
KINDS = ("mm", "add", "relu", "t", "t", "detach", "part", "write", "draw")
KINDS += ("send", "send", "wait")


class Making:
    """A graph, node by node, with the values of the meta device."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, target: Any, *args: Any, name: str = "") -> Node:
        node = self.graph.create_node("call_function", target, args, name=name or None)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        # Collectives have no meta kernel until Dynamo or DTensor is imported.
        is_ours = is_launch(node) or is_wait(node)
        node.meta["val"] = torch.empty_like(values[0]) if is_ours else target(*values)
        return node

    def launch(
        self, tensor: Node, op: str = "sum", group: str = GROUP, name: str = ""
    ) -> Node:
        return self.call(FUNCTIONAL.all_reduce.default, tensor, op, group, name=name)

    def wait(self, result: Node, name: str = "") -> Node:
        return self.call(FUNCTIONAL.wait_tensor.default, result, name=name)

    def reduced(self, tensor: Node, op: str = "sum", group: str = GROUP) -> Node:
        """All-reduced and waited for at once."""
        name = f"reduce_{tensor.name}"
        return self.wait(self.launch(tensor, op, group, name), f"wait_{tensor.name}")

    def returning(self, *values: Any) -> Graph:
        self.graph.output(values)
        self.graph.lint()
        return self.graph


def names(graph: Graph) -> list[str]:
    """What a graph does, in order: its inputs and its return left out."""
    return [n.name for n in graph.nodes if n.op == "call_function"]


def run(graph: Graph, seed: int = 0) -> tuple[list[Any], list[torch.Tensor]]:
    """What a graph returns and what it leaves in its inputs."""
    torch.manual_seed(seed)
    values: dict[Node, Any] = {}
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            like = node.meta["val"]
            values[node] = torch.randn(like.shape).to(like.dtype)
            inputs.append(values[node])
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = _value(node, values)
    results = [values[v] if isinstance(v, Node) else v for v in returned(graph)]
    return [_kept(r) for r in results], inputs


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _value(node: Node, values: dict[Node, Any]) -> Any:
    if is_launch(node):
        poison = [torch.full_like(values[sent], torch.nan) for sent in payload(node)]
        return poison if isinstance(node.args[0], list | tuple) else poison[0]
    if is_wait(node):
        launch, (waited,) = launch_of(node), node.all_input_nodes
        index = waited.args[1] if is_item(waited) else 0
        sent = values[payload(launch)[index]]
        factor = {"sum": 2, "avg": 0.5, "max": 3}[str(launch.args[1])]
        values[waited].copy_(factor * sent + len(str(launch.args[-1])))
        assert operation(launch) == "all_reduce"
        return values[waited]
    args = torch.fx.node.map_arg(node.args, lambda n: values[n])
    kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
    target: Any = node.target
    return target(*args, **kwargs)


def random_graph(seed: int, num_operators: int = 12) -> Graph:
    """Operators, views, writes in place, draws and collectives on small matrices.

    Collectives are waited for at once or later; some results are read, some returned,
    some neither.
    """
    draw = random.Random(seed)
    making = Making()
    whole = [making.input(name, 3, 3) for name in ("x", "y", "z")]
    memory = {node: node for node in whole}  # of each value, the one it shows
    sent: list[Node] = []  # launched, not waited for

    def free(node: Node) -> bool:
        return all(memory[node] is not memory[payload(s)[0]] for s in sent)

    def keep(node: Node, shows: Node | None = None) -> None:
        whole.append(node)
        memory[node] = node if shows is None else memory[shows]

    for _ in range(num_operators):
        one, other = draw.choice(whole), draw.choice(whole)
        kind = draw.choice(KINDS)
        if kind == "mm":
            keep(making.call(aten.mm.default, one, other))
        elif kind == "add":
            keep(making.call(aten.add.Tensor, one, other))
        elif kind == "relu":
            keep(making.call(aten.relu.default, one))
        elif kind == "t":
            keep(making.call(aten.t.default, one), one)
        elif kind == "detach":
            keep(making.call(aten.detach.default, one), one)
        elif kind == "part" and free(one):
            rows = making.call(aten.split.Tensor, one, 2)
            first = making.call(operator.getitem, rows, 0)
            making.call(aten.mul_.Scalar, first, 0.5)
        elif kind == "write" and free(one):
            keep(making.call(aten.mul_.Scalar, one, 1.5), one)
        elif kind == "draw":
            keep(making.call(aten.rand_like.default, one))
        elif kind == "send":
            sent.append(making.launch(one, draw.choice(["avg", "sum", "max"])))
        elif sent:
            keep(making.wait(sent.pop(draw.randrange(len(sent)))))
    for launch in sent:
        keep(making.wait(launch))
    return making.returning(*draw.sample(whole, min(4, len(whole))), None)
