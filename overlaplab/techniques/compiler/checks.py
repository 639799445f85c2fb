"""What every pass is checked for: the same values, the same messages, each waited for.

See [Note: equal values] in meaning.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.graphs import (
    GraphError,
    copied,
    returned,
)
from overlaplab.techniques.compiler.meaning import Meaning, Numbers, meaning

Settings = ParamSpec("Settings")
_KNOWN = "_overlaplab_meaning"
Pass = Callable[Concatenate[Graph, Settings], Graph]


def check_same(
    before: Graph,
    after: Graph,
    *,
    what: str = "the pass",
    expected: Callable[[Meaning, Numbers], Meaning] | None = None,
) -> None:
    """Refuse `after` if it is not `before` in another order or with other messages.

    Args:
        before, after: a pass's graph in and out.
        what: the pass, for the message.
        expected: for a pass that puts messages in: what `after` is to mean instead.

    Raises:
        GraphError: it computes, draws, sends or returns something else, or does not
            lint; the message says what.
    """
    try:
        after.lint()
    except Exception as error:
        raise GraphError(
            f"{what} left a graph that is no graph: {error}. A node must stand behind "
            "all that it takes."
        ) from error
    numbers, old = _known_meaning(before)
    new = meaning(after, numbers)
    if expected is not None:
        old = expected(old, numbers)
    if old.messages != new.messages:
        lost, added = old.messages - new.messages, new.messages - old.messages
        raise GraphError(
            f"{what} does not send what was to be sent: of {old.messages.total()} "
            f"tensors {lost.total()} are not sent any more, {added.total()} are new. A "
            "rank that skips a collective leaves the others waiting for ever."
        )
    if len(old.returns) != len(new.returns):
        raise GraphError(
            f"{what} returns {len(new.returns)} values; expected {len(old.returns)}"
        )
    names = [v.name if isinstance(v, Node) else str(v) for v in returned(after)]
    for position, name in enumerate(names):
        if old.returns[position] != new.returns[position]:
            raise GraphError(
                f"{what} changes what the graph computes: result {position}, {name}, "
                f"is not what it was. Look for a dependency that was dropped, or a "
                "result that was handed to another."
            )
    if (old.inputs, old.drawn) != (new.inputs, new.drawn):
        raise GraphError(
            f"{what} changes what the graph leaves in its inputs, or the order of its "
            "random draws. Keep writes in place, and draws, in their order."
        )
    setattr(after, _KNOWN, (_nodes_and_inputs(after), numbers, new))


def _known_meaning(graph: Graph) -> tuple[Numbers, Meaning]:
    """Of a graph that a pass has just left, as it was found there."""
    nodes, numbers, known = getattr(graph, _KNOWN, (None, None, None))
    if known is None or nodes is None or numbers is None:
        fresh = Numbers()
        return fresh, meaning(graph, fresh)
    now = _nodes_and_inputs(graph)
    if len(now) != len(nodes) or any(
        one is not other
        for pair in zip(now, nodes, strict=True)
        for one, other in zip(*pair, strict=True)
    ):
        return numbers, meaning(graph, numbers)  # somebody changed it since
    return numbers, known


def _nodes_and_inputs(graph: Graph) -> list[tuple[object, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def graph_pass(
    run: Callable[Concatenate[Graph, Settings], None],
) -> Callable[Concatenate[Graph, Settings], Graph]:
    """Make a pass of a function that changes a graph: graph in, graph out, checked.

    The pass works on a copy; `check_same` compares it with what went in.
    """

    @functools.wraps(run)
    def checked(
        graph: Graph, /, *args: Settings.args, **kwargs: Settings.kwargs
    ) -> Graph:
        after = copied(graph)
        run(after, *args, **kwargs)
        check_same(graph, after, what=run.__name__)
        return after

    return checked
