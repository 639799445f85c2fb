"""Messages that may travel together: the graphs on which 13.4 is asked, and merging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler import Merge, merge
from overlaplab_course.lab13 import graphs

KB = 1000
# Of each message: its size in kB, the messages whose results are needed to make what it
# sends, and through so many operators more.
Row = tuple[int, tuple[int, ...], int]
PLANS: dict[str, tuple[Row, ...]] = {
    "six of a size": ((40, (), 0),) * 6,
    "one larger than the cap": (
        *((30, (), 0),) * 2,
        (200, (), 0),
        *((30, (), 0),) * 3,
    ),
    "one sends what another brought": (
        (20, (), 0),
        (20, (0,), 0),
        (20, (), 0),
        (20, (), 0),
    ),
    "one needs another far back": (
        (20, (), 0),
        (20, (), 0),
        (20, (), 0),
        (20, (1,), 3),
        (20, (), 0),
    ),
    "sizes that just fit": (
        (60, (), 0),
        (40, (), 0),
        (10, (), 0),
        (90, (), 0),
        (100, (), 0),
        (1, (), 0),
    ),
}
CAPS = (45 * KB, 100 * KB, 1000 * KB)


def plan_graph(plan: str) -> Graph:
    """A backward pass that launches the messages of a plan as they are ready."""
    graph, sent = Graph(), list[Node]()
    rows = PLANS[plan]
    last = _node(graph, graph.placeholder("grad"), rows[0][0])
    for number, (size, needs, far) in enumerate(rows):
        last = _call(graph, "relu", (last,), f"layer_{number}", size)
        for i, need in enumerate(needs):
            last = _call(graph, "add", (last, sent[need]), f"with_{number}_{i}", size)
        for i in range(far):
            last = _call(graph, "relu", (last,), f"far_{number}_{i}", size)
        name = f"all_reduce_{number}"
        launch = _call(graph, "avg", (last, "avg", graphs.GROUP), name, size)
        if any(number in row[1] for row in rows):
            launch = _call(graph, "wait", (launch,), f"wait_{number}", size)
        sent.append(launch)
    for number, launch in enumerate(sent):
        if launch.target is not graphs.OPERATORS["wait"]:
            size = rows[number][0]
            sent[number] = _call(graph, "wait", (launch,), f"wait_{number}", size)
    graph.output(tuple(sent))
    return graph


def _call(graph: Graph, what: str, args: tuple[Any, ...], name: str, size: int) -> Node:
    target = graphs.OPERATORS[what]
    return _node(
        graph, graph.create_node("call_function", target, args, name=name), size
    )


def _node(graph: Graph, node: Node, size: int) -> Node:
    node.meta["val"] = torch.empty(size * KB // 4, device="meta")
    return node


def sent_bytes(launch: Node) -> int:
    """What a launch of one tensor sends."""
    tensor: torch.Tensor = launch.all_input_nodes[0].meta["val"]
    return tensor.numel() * tensor.element_size()


def planned(
    make: Callable[..., Iterable[Iterable[Node]]], plan: str, cap_bytes: int
) -> list[list[str]]:
    """The names in the buckets that a learner's function makes."""
    graph = plan_graph(plan)
    made = make(graph, graphs.needs_of(graph), cap_bytes)
    if not isinstance(made, Iterable):
        raise TypeError(f"plan_buckets returned {made!r}; expected a list of lists")
    most = 1 + len(list(graph.nodes))  # a plan may never end
    return [
        graphs.names_in(bucket, "plan_buckets", "a list of lists of nodes")
        for bucket in islice(made, most)
    ]


def merged(graph: Graph, buckets: Sequence[Sequence[Node]]) -> Graph:
    """A graph in which each bucket is one launch, with a wait for each tensor."""
    merges = [
        Merge(
            tuple(launch.name for launch in bucket),
            sum(map(sent_bytes, bucket)),
            ("avg",),
        )
        for bucket in buckets
    ]
    return merge(graph, merges)
