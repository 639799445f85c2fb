"""Which tensors a collective may overwrite with its results, instead of copies."""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.dependencies import Memory, Root, reads_of
from overlaplab.techniques.compiler.graphs import facts_of, is_launch, payload


def find_owned(graph: Graph) -> dict[Node, set[Node]]:
    """Of each launch, the tensors that may be overwritten with their averages.

    Such a tensor's memory was made in the graph, is dense, and is read by nobody behind
    the launch but by that.
    """
    memory = Memory()
    made: set[Root] = set()
    readers: dict[Root, list[Node]] = {}
    for node in graph.nodes:
        facts = facts_of(node)
        roots = memory.add(node, facts)
        if node.op == "call_function":
            made.update(root for root in roots if _maker(root) is not None)
        # A view that is made later reads nothing now: who uses it is a reader, too.
        for root in memory.of((*reads_of(node, facts), *facts.writes)):
            readers.setdefault(root, []).append(node)
    place = {node: i for i, node in enumerate(graph.nodes)}
    owned: dict[Node, set[Node]] = {}
    for launch in (node for node in graph.nodes if is_launch(node)):
        sent = Counter(root for t in payload(launch) for root in memory.of([t]))
        owned[launch] = {
            tensor
            for tensor in payload(launch)
            if all(
                root in made
                and sent[root] == 1
                and all(place[n] <= place[launch] for n in readers[root])
                for root in memory.of([tensor])
            )
            and _is_dense(tensor.meta["val"])
        }
    return owned


def _maker(root: Root) -> Node | None:
    """The operator that made a storage; None if it was given."""
    node = root[0] if isinstance(root, tuple) else root
    assert isinstance(node, Node)
    return node if node.op == "call_function" else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Does each byte of its memory belong to one element, without holes?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
