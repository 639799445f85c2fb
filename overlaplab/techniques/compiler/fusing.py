"""What the kernels take that Inductor makes of a graph, by a rule of thumb.

Inductor puts what computes element by element, and reductions, into the kernels of
those who read it. So a value that only such operators read is never stored, and a
kernel reads what stands in memory at the beginning of such chains, or its part of it.
Its tiling, kernels with several results and rereading by reductions are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch.fx import Node

from overlaplab.hardware import Hardware
from overlaplab.operators import NodeFacts
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.graphs import facts_of, is_view, node_bytes

_TAGS = {torch.Tag.pointwise, torch.Tag.reduction}
# Without these tags; Inductor computes them element by element, too.
_FUSED = frozenset(
    {"_to_copy", "cat", "constant_pad_nd", "full", "gather", "scalar_tensor", "scatter"}
)


class FusedCosts(Costs):
    """`Costs` of graphs that Inductor compiles."""

    how = ", kernels fused by a rule of thumb"

    def __init__(self, hardware: Hardware, num_ranks: int | Mapping[str, int]) -> None:
        super().__init__(hardware, num_ranks)
        self._fused: WeakKeyDictionary[Node, NodeFacts] = WeakKeyDictionary()

    def facts(self, node: Node) -> NodeFacts:
        """Of the kernel that ends in `node`; inside a kernel nothing runs."""
        if node not in self._fused:
            self._fused[node] = _facts(node)
        return self._fused[node]


def _facts(node: Node) -> NodeFacts:
    facts = facts_of(node)
    if not _fuses(node):
        return facts
    if _is_inside(node):
        inside = replace(facts.operator, records=False)
        return replace(facts, operator=inside, read_bytes=0, write_bytes=0)
    written = node_bytes([node])
    return replace(facts, read_bytes=_read_bytes(node), write_bytes=written)


def _fuses(node: Node) -> bool:
    """Is it computed in the kernel of whoever reads it?"""
    if node.op != "call_function":
        return False
    facts = facts_of(node)
    if facts.writes or facts.draws or not facts.operator.records:
        return False
    return facts.operator.name in _FUSED or not _TAGS.isdisjoint(
        getattr(node.target, "tags", ())
    )


def _is_inside(node: Node) -> bool:
    """Is it never stored, since only fused operators read it?"""
    return all(map(_fuses, _readers(node)))


def _readers(node: Node) -> Iterator[Node]:
    """Those of its views included."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _read_bytes(node: Node) -> int:
    """By the kernel that ends in `node`: of each stored value what it uses of it."""
    found: dict[Node, int] = {}
    seen, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            whole = source
            while is_view(whole):
                whole = facts_of(whole).aliases[0]
            if not (_fuses(whole) and _is_inside(whole)):
                found[whole] = found.get(whole, 0) + node_bytes([source])
            elif whole not in seen:
                seen.add(whole)
                todo.append(whole)
    return sum(min(used, node_bytes([whole])) for whole, used in found.items())
