"""A graph of nine operators, small enough to follow by hand: three layers' backward.

Each layer has its gradient for the layer below (dX), for its weight (dW) and a message
with the latter, all in the order in which autograd makes them, nothing overlapped.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.graphs import FUNCTIONAL

_MM = torch.ops.aten.mm.default


def nine_operators(width: int = 100, rows: int = 100, group: str = "0") -> Graph:
    """dX, dW and an all-reduce of dW, for three layers, the last layer first.

    A matmul has 2 x rows x width^2 FLOP and a message 4 x width^2 bytes: on `chalk`
    2 us and, on two ranks, 5 us by default. The waits are not operators; they stand
    behind their messages, serially.

    Args:
        width: of the layers.
        rows: of the batch.
        group: name of the process group.

    Returns:
        A graph of (grad, x3, w3, x2, w2, x1, w1), which returns dX of the first layer
        and the three averages, the last layer's first.
    """
    graph = Graph()
    shapes = {"grad": (rows, width)}
    for layer in (3, 2, 1):
        shapes |= {f"x{layer}": (rows, width), f"w{layer}": (width, width)}
    inputs = {name: _input(graph, name, shape) for name, shape in shapes.items()}
    grad = inputs["grad"]
    averages = []
    for layer in (3, 2, 1):
        x, w = inputs[f"x{layer}"], inputs[f"w{layer}"]
        below = _call(graph, f"dx{layer}", _MM, (grad, w), (rows, width))
        grad_t = _call(
            graph, f"grad{layer}_t", torch.ops.aten.t.default, (grad,), (width, rows)
        )
        weight = _call(graph, f"dw{layer}", _MM, (grad_t, x), (width, width))
        averages.append(_averaged(graph, weight, group))
        grad = below
    graph.output((grad, *averages))
    return graph


def _averaged(graph: Graph, weight: Node, group: str) -> Node:
    shape = tuple(weight.meta["val"].shape)
    reduce = FUNCTIONAL.all_reduce.default
    sent = _call(
        graph, f"all_reduce_{weight.name}", reduce, (weight, "avg", group), shape
    )
    wait = FUNCTIONAL.wait_tensor.default
    return _call(graph, f"wait_{weight.name}", wait, (sent,), shape)


def _input(graph: Graph, name: str, shape: tuple[int, ...]) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape, device="meta")
    return node


def _call(
    graph: Graph,
    name: str,
    target: object,
    args: tuple[object, ...],
    shape: tuple[int, ...],
) -> Node:
    node = graph.create_node("call_function", target, args, name=name)  # type: ignore[arg-type]
    node.meta["val"] = torch.empty(shape, device="meta")
    return node
