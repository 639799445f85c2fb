"""The pass that takes out what a backward graph has for autograd's sake only.

A `detach` is its input where nothing differentiates, and a transpose of a transpose is
what was transposed. Both launch nothing on a GPU, and cost the CPU a call each.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.checks import graph_pass
from overlaplab.techniques.compiler.graphs import output_of

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_TRANSPOSE = torch.ops.aten.t.default


@graph_pass
def simplify(graph: Graph) -> None:
    """Let readers read past `detach` and past pairs of `t`.

    For backward graphs. In a forward one, a result and its `detach` that is saved must
    stay two tensors, or saving it would keep itself alive.
    """
    last = output_of(graph)
    for node in graph.nodes:
        source = _source(node)
        if source is None:
            continue
        if node.target in _SAME and last in node.users:
            continue
        node.replace_all_uses_with(source)
        middle = node.all_input_nodes[0]
        graph.erase_node(node)
        if middle is not source and not middle.users:
            graph.erase_node(middle)


def _source(node: Node) -> Node | None:
    """What `node` is the same as, if it is."""
    if node.op != "call_function":
        return None
    if node.target in _SAME:
        return node.all_input_nodes[0]
    if node.target is _TRANSPOSE and node.all_input_nodes[0].target is _TRANSPOSE:
        return node.all_input_nodes[0].all_input_nodes[0]
    return None
