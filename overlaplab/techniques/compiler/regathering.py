"""Parameters that are given up after the forward, and gathered again in the backward.

What is gathered once is whole from its first use to its last, so at the end of the
forward all of a model is. Gathered again, as ZeRO-3 does, only what is read soon is
whole; half as many bytes more travel. Nothing but an order holds that up: a gather
needs the shard alone and would leave at once. So it is *held* behind an operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.dependencies import Memory
from overlaplab.techniques.compiler.graphs import (
    HELD_BEHIND,
    GraphError,
    facts_of,
    is_view,
    is_wait,
    launch_of,
    launches,
    node_bytes,
    operation,
    results,
    sent_bytes,
)


def gather_again(
    graph: Graph, wholes: Sequence[Node], ends: Sequence[Node], ahead_bytes: int | None
) -> list[Node]:
    """Let the backward read gathers of its own, and hold all gathers.

    Args:
        graph: forward and backward in one; changed.
        wholes: the waits of the gathers, which all readers read.
        ends: what the forward returns.
        ahead_bytes: that may be gathered before they are read; None: twice the largest.

    Returns:
        Those of `wholes` that are gathered again.

    Raises:
        GraphError: the graph returns nothing but gradients.
    """
    if not ends:
        raise GraphError(
            "the graph returns gradients alone, so nobody knows where its backward "
            "begins. Return the loss, too, as capture_gradients does."
        )
    forward = set(ends)
    for node in reversed(graph.nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    place = {node: i for i, node in enumerate(graph.nodes)}
    again = {whole: _readers(whole, forward) for whole in wholes}
    again = {whole: readers for whole, readers in again.items() if readers}
    second = [
        _again(graph, w, sorted(r, key=place.__getitem__)) for w, r in again.items()
    ]
    if ahead_bytes is None:
        ahead_bytes = 2 * max((sent_bytes(launch_of(w)) for w in wholes), default=0)
    for whole in wholes:  # behind what they are held behind
        user = min(whole.users, key=place.__getitem__, default=whole)
        user.prepend(launch_of(whole))
        user.prepend(whole)
    _hold(graph, wholes, [], ahead_bytes)
    _hold(graph, second, ends, ahead_bytes)
    return list(again)


def _readers(value: Node, forward: set[Node]) -> set[Node]:
    """Of the backward: who reads `value`, or what the forward sees of it."""
    found = {user for user in value.users if user not in forward}
    for user in value.users:
        if user in forward and is_view(user):
            found |= _readers(user, forward)
    return {user for user in found if user.op != "output"}


def _again(graph: Graph, whole: Node, readers: list[Node]) -> Node:
    """A second gather for `readers`; returns its wait."""
    made: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        new = graph.node_copy(node, lambda n: made.get(n, n))
        made[node] = new
        return new

    def remade(node: Node) -> Node:
        """Of the second gather, what `node` is of the first."""
        if node not in made:
            remade(node.all_input_nodes[0])
            copy(node)
        return made[node]

    with graph.inserting_before(readers[0]):
        copy(launch_of(whole))
        second = copy(whole)
        for reader in readers:
            for source in reader.all_input_nodes:
                if source is whole or _shows(source, whole):
                    reader.replace_input_with(source, remade(source))
    return second


def _shows(node: Node, whole: Node) -> bool:
    while not is_wait(node) and is_view(node):
        node = node.all_input_nodes[0]
    return node is whole


def _hold(
    graph: Graph, wholes: Sequence[Node], start: Sequence[Node], ahead_bytes: int
) -> None:
    """Let no more than `ahead_bytes` be gathered that nobody has read yet."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    reading = sorted((_first_reader(w, place), w) for w in wholes)
    order = list(place)
    sizes = [node_bytes([whole]) for _, whole in reading]
    for i, (_, whole) in enumerate(reading):
        first, total = i, sizes[i]
        while first and total + sizes[first - 1] <= ahead_bytes:
            first -= 1
            total += sizes[first]
        behind = [order[reading[first - 1][0]]] if first else start
        launch_of(whole).meta[HELD_BEHIND] = tuple(node.name for node in behind)


def _first_reader(whole: Node, place: dict[Node, int]) -> int:
    """Where the first operator stands that reads `whole`, through views or not."""
    return min(
        (
            _first_reader(user, place) if is_view(user) else place[user]
            for user in whole.users
        ),
        default=len(place) - 1,
    )


def peak_whole(graph: Graph) -> int:
    """The most bytes of gathered tensors that are there at once, at any place.

    From the launch of a gather to the last use of what it gave.
    """
    memory = Memory()
    place: dict[Node, int] = {}
    last: dict[object, int] = {}
    for position, node in enumerate(graph.nodes):
        place[node] = position
        memory.add(node, facts_of(node))
        last |= dict.fromkeys(memory.of(node.all_input_nodes), position)
    changes = []
    for launch in launches(graph):
        if not operation(launch).startswith("all_gather"):
            continue
        for result in results(launch):
            size = node_bytes([result])
            end = max(last.get(root, place[result]) for root in memory.of([result]))
            changes += [(place[launch], size), (end + 1, -size)]
    held = peak = 0
    for _, size in sorted(changes):
        held += size
        peak = max(peak, held)
    return peak
