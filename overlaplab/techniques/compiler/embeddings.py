"""The pass that sends an embedding's gradient as rows instead of as a whole table.

The gradient of a table has a row for each word, and all are zero but those that the
batch looked up. An average sends them all. Here each rank gathers from every rank one
row for each token, and which row of the table it belongs to, and adds them up itself.
For 32,768 words and 2,048 tokens on each of two ranks that is a sixteenth of the bytes.

It needs a graph: a hook on the parameter sees the gradient when the rows are added up
already. And it needs a bound on the tokens, as ranks must send equal sizes whatever
their batches. `nn.Embedding(sparse=True)` needs neither, but every optimizer must take
its sparse gradients, and Adam refuses them.

Rows are added up in the table's dtype. A CPU adds them one by one, so that in bfloat16
the gradient of a frequent word is coarser than an average of tables: for 20 words and
600 random rows on each of four ranks it was 1.2 % off, an average 0.7 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.operators import tensor_bytes
from overlaplab.techniques.compiler.checks import check_same
from overlaplab.techniques.compiler.graphs import (
    FUNCTIONAL,
    add_behind,
    copied,
    output_of,
    returned,
)
from overlaplab.techniques.compiler.insertion import (
    check_positions,
    identifier,
    insert_all_reduces,
)
from overlaplab.techniques.compiler.meaning import Meaning, Numbers, Value, meaning

_TABLE = torch.ops.aten.embedding_dense_backward.default
_FLAT = torch.ops.aten.view_copy.default
_DIVIDE = torch.ops.aten.div.Scalar
_PAD = torch.ops.aten.constant_pad_nd.default
_FIRST = torch.ops.aten.slice_copy.Tensor
_GATHER = FUNCTIONAL.all_gather_into_tensor.default
_WAIT = FUNCTIONAL.wait_tensor.default


@dataclass(frozen=True, slots=True)
class Lookup:
    """A gradient that is sent as rows.

    Args:
        result: its position in what the graph returns.
        name: of the parameter.
        tokens: position of the graph's input that holds the tokens.
        rows: how many each rank sends; fewer tokens are filled up with zeros.
    """

    result: int
    name: str
    tokens: int
    rows: int

    def check(self, args: Sequence[Any]) -> None:
        """Refuse a batch of more tokens than are sent.

        Args:
            args: what the graph is about to run on.

        Raises:
            ValueError: it has more.
        """
        number = args[self.tokens].numel()
        if number > self.rows:
            raise ValueError(
                f"this rank looks up {number:,} tokens in {self.name}, and "
                f"embedding_rows is {self.rows:,}: nothing was sent. Give every rank "
                f"backend(embedding_rows=...) of the largest batch, {number:,} or more."
            )


def insert_averages(
    graph: Graph,
    gradients: Mapping[int, str],
    group: str,
    num_ranks: int,
    rows: int | None = None,
) -> tuple[Graph, list[Lookup]]:
    """As `insert_all_reduces`, with rows for the tables of which they are less.

    Args:
        graph, gradients, group: see `insert_all_reduces`.
        num_ranks: of the group.
        rows: tokens of a rank's batch, at most; None: all is averaged whole.

    Returns:
        A new graph, in which gradients are averages; and what is sent as rows.

    Raises:
        GraphError, ValueError, TypeError: see `insert_all_reduces`, `plan_lookups`.
    """
    found: list[Lookup] = []
    if rows is not None:
        found = plan_lookups(graph, gradients, rows, num_ranks)
        graph = gather_lookups(graph, found, group, num_ranks)
    own = {lookup.result for lookup in found}
    others = {p: name for p, name in gradients.items() if p not in own}
    return insert_all_reduces(graph, others, group), found


def plan_lookups(
    graph: Graph, gradients: Mapping[int, str], rows: int, num_ranks: int
) -> list[Lookup]:
    """Pick the gradients that are cheaper to send as rows.

    That is where rows are fewer bytes than a ring's all-reduce of the table, which
    carries it nearly twice. The table is averaged whole if a head shares it, if
    `scale_grad_by_freq` is set, if something else reads the gradient, or if its tokens
    are no input of the graph.

    Args:
        graph: a backward pass.
        gradients: position in what it returns -> name of the parameter.
        rows: tokens of a rank's batch, at most.
        num_ranks: of the group.

    Raises:
        ValueError, TypeError: see `check_positions`; `rows` or `num_ranks` is no
            positive whole number.
    """
    check_positions(graph, gradients)
    for what, value in (("rows", rows), ("num_ranks", num_ranks)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{what} is {value!r}; expected a whole number")
        if value < 1:
            raise ValueError(f"{what} is {value}; expected at least 1")
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results = returned(graph)
    found = []
    for result, name in gradients.items():
        node = results[result]
        if not isinstance(node, Node) or node.target is not _TABLE:
            continue
        _, tokens, _, _, by_frequency = node.args
        alone = set(node.users) == {output_of(graph)} and results.count(node) == 1
        if by_frequency or tokens not in inputs or not alone:
            continue
        table = node.meta["val"]
        token = table.shape[1] * table.element_size() + _bytes_of_one(tokens)
        if num_ranks * rows * token < 2 * tensor_bytes(table):
            found.append(Lookup(result, name, inputs.index(tokens), rows))
    return found


def _bytes_of_one(tokens: Any) -> int:
    size: int = tokens.meta["val"].element_size()
    return size


def gather_lookups(
    graph: Graph, lookups: Sequence[Lookup], group: str, num_ranks: int
) -> Graph:
    """Gather the rows of embeddings' gradients, and sum them on every rank.

    The gathers are waited for at once: later passes move them. `insert_all_reduces` is
    for the other gradients.

    Args:
        graph: a backward pass.
        lookups: of `plan_lookups`.
        group: name of the process group.
        num_ranks: its size.

    Returns:
        A new graph, in which these gradients are averages over the ranks.

    Raises:
        GraphError: it would change anything else.
    """
    after = copied(graph)
    for lookup in lookups:
        table = returned(after)[lookup.result]
        rows, tokens, *settings = table.args
        ways = _sent(rows, tokens, lookup.rows, num_ranks)
        own = identifier(lookup.name)
        whole = [
            _gathered(value, steps, f"{what}_{own}", group, num_ranks)
            for value, steps, what in zip(
                (rows, tokens), ways, ("rows", "tokens"), strict=True
            )
        ]
        table.args = (*whole, *settings)

    def expected(old: Meaning, numbers: Numbers) -> Meaning:
        return _expected(graph, old, numbers, lookups, group, num_ranks)

    check_same(graph, after, what="gather_lookups", expected=expected)
    return after


# An operator, its arguments behind the tensor, and the shape of what it gives.
_Step = tuple[Any, tuple[Any, ...], tuple[int, ...]]


def _gathered(
    value: Node, steps: Sequence[_Step], own: str, group: str, num_ranks: int
) -> Node:
    """Put steps, a gather and its wait behind a value; returns the wait."""
    place = _last_input(value.graph) if value.op == "placeholder" else value
    like = value.meta["val"]
    for number, (target, constants, shape) in enumerate(steps, 1):
        # The same name, padded or not, since ranks compare names of what they send.
        name = f"sent_{own}" if number == len(steps) else own
        like = like.new_empty(shape)
        place = value = add_behind(place, target, (value, *constants), name, like)
    whole = like.new_empty((num_ranks * like.shape[0], *like.shape[1:]))
    sent = (value, num_ranks, group)
    launch = add_behind(value, _GATHER, sent, f"gather_{own}", whole)
    return add_behind(launch, _WAIT, (launch,), f"all_{own}", whole)


def _sent(
    rows: Node, tokens: Node, num_rows: int, num_ranks: int
) -> Iterator[list[_Step]]:
    """The operators that prepare rows and tokens for sending.

    Rows are divided before they are summed, as NCCL does, so that float16 stays finite.
    """
    number, width = tokens.meta["val"].numel(), rows.meta["val"].shape[-1]
    for shape, padding, divides in (
        ((width,), [0, 0, 0, num_rows], True),
        ((), [0, num_rows], False),
    ):
        steps: list[_Step] = [(_FLAT, ([-1, *shape],), (number, *shape))]
        if divides:
            steps.append((_DIVIDE, (num_ranks,), (number, *shape)))
        if not isinstance(number, int) or number != num_rows:
            # The number may be a symbol: pad by all of them, then cut.
            steps.append((_PAD, (padding, 0), (number + num_rows, *shape)))
            steps.append((_FIRST, (0, 0, num_rows), (num_rows, *shape)))
        yield steps


def _last_input(graph: Graph) -> Node:
    last: Node = [n for n in graph.nodes if n.op == "placeholder"][-1]
    return last


def _expected(
    graph: Graph,
    old: Meaning,
    numbers: Numbers,
    lookups: Sequence[Lookup],
    group: str,
    num_ranks: int,
) -> Meaning:
    """Tables are summed from what was gathered, all else is as it was."""
    example = Graph()
    sent = example.placeholder("sent")
    gather = example.call_function(_GATHER, (sent, num_ranks, group))
    returns, messages = list(old.returns), old.messages.copy()
    for lookup in lookups:
        rows, tokens, *settings = returned(graph)[lookup.result].args
        parts = [Value(number) for number in _read(graph, numbers, (rows, tokens))]
        steps = _sent(rows, tokens, lookup.rows, num_ranks)
        for at, part_steps in enumerate(steps):
            for target, constants, _ in part_steps:
                made = numbers.call(target, parts[at], *constants)
                parts[at] = Value(numbers.read(made))
            reduced = numbers.reduced(gather, parts[at].number)
            messages[reduced] += 1
            parts[at] = Value(numbers.read(reduced))
        whole = numbers.call(_TABLE, *parts, *settings)
        returns[lookup.result] = numbers.read(whole)
    return replace(old, returns=returns, messages=messages)


def _read(graph: Graph, numbers: Numbers, values: Sequence[Any]) -> list[int]:
    """What these nodes hold at the end of a graph."""
    seen = copied(graph)
    named = {node.name: node for node in seen.nodes}
    own = [named[value.name] for value in values]
    output_of(seen).args = ((*returned(seen), *own),)
    return meaning(seen, numbers).returns[-len(own) :]
