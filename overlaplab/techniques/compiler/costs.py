"""What each node of a graph takes alone, by the formulas of `overlaplab.hardware`."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch.fx import Node

from overlaplab.hardware import Hardware, collective_ns, compute_ns
from overlaplab.operators import NodeFacts, dtype_name, tensors_in
from overlaplab.techniques.compiler.graphs import (
    facts_of,
    group_of,
    is_launch,
    operation,
    sent_bytes,
)

# Of functional collectives -> of `hardware.collective_ns`.
_OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


class Costs:
    """Nanoseconds of the nodes of graphs, each worked out once.

    Args:
        hardware: the profile. Contention is left out: what is asked here is what an
            operator or a message takes alone.
        num_ranks: of every process group, or by its name.

    Raises:
        ValueError: a group has fewer than one rank.
    """

    how = ""  # they are found, for people, behind the name of the machine

    def __init__(self, hardware: Hardware, num_ranks: int | Mapping[str, int]) -> None:
        sizes = [num_ranks] if isinstance(num_ranks, int) else [*num_ranks.values()]
        if min(sizes, default=1) < 1:
            raise ValueError(f"num_ranks is {num_ranks}; expected at least 1")
        self.hardware = hardware
        self._num_ranks = num_ranks
        self._known: WeakKeyDictionary[Node, int] = WeakKeyDictionary()

    def on(self, hardware: Hardware) -> Costs:
        """The same groups on another machine."""
        return type(self)(hardware, self._num_ranks)

    def facts(self, node: Node) -> NodeFacts:
        """What runs for `node`, and the bytes that it moves."""
        return facts_of(node)

    def launch_ns(self, node: Node) -> int:
        """What launching `node`, no message, costs the CPU: 0 for a view."""
        return self.hardware.launch_ns if self.facts(node).operator.records else 0

    def ranks_of(self, group: str) -> int:
        """The size of a process group.

        Raises:
            ValueError: nobody said how large it is.
        """
        if isinstance(self._num_ranks, int):
            return self._num_ranks
        if group not in self._num_ranks:
            raise ValueError(
                f"num_ranks has no group {group!r}, only {', '.join(self._num_ranks)}"
            )
        return self._num_ranks[group]

    def __call__(self, node: Node) -> int:
        """What `node` takes alone: 0 for a view, a wait, an input."""
        ns = self._known.get(node)
        if ns is None:
            ns = self._known[node] = (
                self.message_ns(node, sent_bytes(node))
                if is_launch(node)
                else self._kernel_ns(self.facts(node), node)
            )
        return ns

    def _kernel_ns(self, facts: NodeFacts, node: Node) -> int:
        if not facts.operator.records:
            return 0
        moved = facts.read_bytes + facts.write_bytes
        name, dtype = facts.operator.name, kernel_dtype(node)
        return compute_ns(self.hardware, facts.flops, dtype, moved, name)

    def message_ns(self, launch: Node, num_bytes: int) -> int:
        """What a message like that of `launch` takes if it has `num_bytes`."""
        num_ranks = self.ranks_of(group_of(launch))
        operation = hardware_operation(launch)
        return sum(collective_ns(self.hardware, operation, num_ranks, num_bytes))

    def message_launch_ns(self, num_tensors: int) -> int:
        """What launching one message costs the CPU."""
        hw = self.hardware
        others = (num_tensors - 1) * hw.collective_part_launch_ns
        return hw.collective_launch_ns + others


def kernel_dtype(node: Node) -> str:
    """In which a kernel computes: that of its first tensor."""
    for source in (*node.all_input_nodes, node):
        for tensor in tensors_in((source.meta.get("val"),)):
            if tensor.is_floating_point():
                return dtype_name(tensor.dtype)
    return ""


def hardware_operation(launch: Node) -> str:
    """The name by which `overlaplab.hardware` and programs know a collective."""
    return _OPERATIONS.get(operation(launch), operation(launch))
