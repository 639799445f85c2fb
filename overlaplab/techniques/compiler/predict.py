"""When each node of a graph would run: the graph as a program, resolved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch.fx import Graph, Node

from overlaplab.operators import NodeFacts, dtype_name, tensor_bytes, tensors_in
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
from overlaplab.techniques.compiler.insertion import is_average
from overlaplab.techniques.compiler.owning import find_owned
from overlaplab.techniques.compiler.side_stream import StreamPlan
from overlaplab.timeline import Timeline

SIDE = "side"  # the stream of communication, in programs


def program_of(
    graph: Graph,
    num_ranks: int | Mapping[str, int],
    streams: StreamPlan | None = None,
    facts_of: Callable[[Node], NodeFacts] = facts_of,
) -> Program:
    """What a rank launches when it runs `graph` in its order, one for all of them.

    Views and waits launch nothing; operators are labelled with their nodes' names. Each
    process group sends in its own order; on the wire they share the links.

    Args:
        graph: as it stands.
        num_ranks: of its process groups, or of each by name, ranks in a row.
        streams: what runs beside computing; messages are packed there.
        facts_of: what runs for a node.
    """
    names = dict.fromkeys(group_of(node) for node in graph.nodes if is_launch(node))
    sizes = dict.fromkeys(names, num_ranks) if isinstance(num_ranks, int) else num_ranks
    lanes = {name: name for name in names}
    lanes |= dict.fromkeys(list(names)[:1], "default")  # the first group's is "comm"
    most = max((sizes[name] for name in names), default=1)
    builder = ProgramBuilder(1, represents=most)
    side = set(streams.side) if streams else set()
    forks = {crossing.before for crossing in streams.crossings} if streams else set()
    owned = find_owned(graph)
    launched: dict[Node, int] = {}
    for node in graph.nodes:
        stream = SIDE if node.name in side else "default"
        if node.name in forks:
            builder.wait_stream(0, SIDE, "default")
        if is_launch(node):
            alone = len(payload(node)) == 1 and owned[node]
            if side and is_average(node) and not alone:
                _pack(builder, node)
            launched[node] = builder.collective(
                0,
                hardware_operation(node),
                bytes=sent_bytes(node),
                payload=_parts(node),
                group=lanes[group_of(node)],
                ranks=range(sizes[group_of(node)]),
                stream=stream,
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
                    stream=stream,
                    phase="backward",
                    label=node.name,
                )
    return builder.build()


def _pack(builder: ProgramBuilder, launch: Node) -> None:
    """The copy of what is sent into one message."""
    size = sent_bytes(launch)
    builder.compute(
        0,
        "_foreach_copy_",
        read_bytes=size,
        write_bytes=size,
        dtype=kernel_dtype(launch),
        stream=SIDE,
        phase="backward",
        label=f"pack {launch.name}",
    )


def _parts(launch: Node) -> list[PayloadTensor]:
    """What is sent, tensor by tensor: each costs the CPU some time."""
    tensors = tensors_in(tuple(t.meta["val"] for t in payload(launch)))
    return [PayloadTensor(tensor_bytes(t), dtype_name(t.dtype), None) for t in tensors]


def predict(graph: Graph, costs: Costs, streams: StreamPlan | None = None) -> Timeline:
    """The timeline of `graph` as it stands, contention and launching included.

    It is run by Python, so launches of a backward cost what others do.
    """
    groups = {group_of(node) for node in graph.nodes if is_launch(node)}
    sizes = {group: costs.ranks_of(group) for group in groups}
    hardware = replace(costs.hardware, backward_launch_ns=None)
    return resolve(program_of(graph, sizes, streams, costs.facts), hardware)
