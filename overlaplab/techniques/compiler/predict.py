"""When each node of a graph would run: the graph as a program, resolved."""

from __future__ import annotations

from torch.fx import Graph, Node

from overlaplab.operators import dtype_name, tensor_bytes, tensors_in
from overlaplab.program import PayloadTensor, Program, ProgramBuilder, resolve
from overlaplab.techniques.compiler.costs import (
    Costs,
    hardware_operation,
    kernel_dtype,
)
from overlaplab.techniques.compiler.graphs import (
    facts_of,
    group_of,
    is_launch,
    is_wait,
    launch_of,
    payload,
    sent_bytes,
)
from overlaplab.timeline import Timeline


def program_of(graph: Graph, num_ranks: int) -> Program:
    """What a rank launches when it runs `graph` in its order, one for all of them.

    Views and waits launch nothing; operators are labelled with their nodes' names. All
    collectives are of all ranks.

    Args:
        graph: as it stands.
        num_ranks: of its process group.
    """
    builder = ProgramBuilder(1, represents=num_ranks)
    launched: dict[Node, int] = {}
    for node in graph.nodes:
        if is_launch(node):
            launched[node] = builder.collective(
                0,
                hardware_operation(node),
                bytes=sent_bytes(node),
                payload=_parts(node),
                group="default",
                phase="backward",
                label=node.name,
            )
        elif is_wait(node):
            work = launched.pop(launch_of(node), None)
            if work is not None:
                builder.wait(0, work)
        else:
            facts = facts_of(node)
            if facts.operator.records:
                builder.compute(
                    0,
                    facts.operator.name,
                    flops=facts.flops,
                    read_bytes=facts.read_bytes,
                    write_bytes=facts.write_bytes,
                    dtype=kernel_dtype(node),
                    phase="backward",
                    label=node.name,
                )
    return builder.build()


def _parts(launch: Node) -> list[PayloadTensor]:
    """What is sent, tensor by tensor: each costs the CPU some time."""
    tensors = tensors_in(tuple(t.meta["val"] for t in payload(launch)))
    return [PayloadTensor(tensor_bytes(t), dtype_name(t.dtype), None) for t in tensors]


def predict(graph: Graph, costs: Costs) -> Timeline:
    """The timeline of `graph` as it stands, contention and launching included."""
    groups = {group_of(node) for node in graph.nodes if is_launch(node)}
    num_ranks = max((costs.ranks_of(group) for group in groups), default=1)
    return resolve(program_of(graph, num_ranks), costs.hardware)
