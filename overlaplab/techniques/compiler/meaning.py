"""What a graph means, in numbers: equal numbers, equal values.

[Note: equal values] Two graphs are followed side by side without computing anything.
Each value gets a number that stands for how it was made: by which operator, from which
numbers; a value in memory that was written in place gets a new one, a random operator
takes the number of the draw before it. What was reduced gets its number at its launch
and is *open* until its wait. If the numbers of all that is returned, left in the inputs
and sent are equal, so are the values, in whatever order the nodes stand. Dependencies
are not asked: a pass that forgets one is found out here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.dependencies import Memory, Root, reads_of
from overlaplab.techniques.compiler.graphs import (
    GraphError,
    chosen,
    facts_of,
    is_coalesced,
    is_item,
    is_launch,
    is_wait,
    num_elements,
    operation,
    output_of,
    payload,
    returned,
)


@dataclass(frozen=True, slots=True)
class Value:
    """What an operator reads, among arguments that are constants.

    Args:
        number: of what was read, see `Numbers.read`.
    """

    number: int


class Numbers:
    """Gives equal things equal numbers; shared by the graphs that are compared."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, *thing: Hashable) -> int:
        return self._known.setdefault(thing, len(self._known))

    def read(self, content: int) -> int:
        """Of who reads all of a value."""
        return self.of(self.of("whole", content), content)

    def call(self, target: object, *args: object) -> int:
        """What an operator makes of what it reads, a `Value` each, and of constants."""

        def number(arg: Any) -> Hashable:
            return arg.number if isinstance(arg, Value) else _plain(arg)

        return self.of(str(target), _mapped((args, {}), number))

    def reduced(self, launch: Node, sent: int) -> int:
        """What a collective makes of one tensor."""
        settings = tuple(map(_plain, launch.args[1:]))
        return self.of("reduced", operation(launch), settings, sent)


@dataclass
class Meaning:
    """What a graph does, in numbers.

    Args:
        returns: of each value that is returned, in order.
        inputs: of what each input holds at the end, in order.
        messages: how often each reduced value is sent.
        drawn: of the random draws.
    """

    returns: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    messages: Counter[int] = field(default_factory=Counter)
    drawn: int = 0


class _Reader:
    """Follows one graph."""

    def __init__(self, numbers: Numbers, gathers: Mapping[int, Node]) -> None:
        self._numbers = numbers
        self._gathers = gathers
        self._memory = Memory()
        self._content: dict[Root, int] = {}
        self._shape: dict[Node, int] = {}  # which part of its memory a value is
        self._open: dict[Root, Node] = {}  # results, until their wait
        self._transposed: dict[int, int] = {}  # a transpose's part -> what of
        self._results: dict[Any, int] = {}  # the shape of each of a launch's results
        self._sent: dict[Root, list[Root]] = {}  # what an open one still reads
        self._meaning = Meaning(drawn=numbers.of("seed"))

    def follow(self, graph: Graph) -> Meaning:
        inputs = []
        for node in graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder":
                inputs.append(node)
            self._step(node, len(inputs))
        if self._open:
            launch = next(iter(self._open.values()))
            raise GraphError(
                f"{launch.name} is launched and never waited for. Put a wait_tensor "
                "behind each of its results: who reads them would be too early."
            )
        for value in returned(graph):
            number = self._read(value, output_of(graph))
            self._meaning.returns.append(number)
        self._meaning.inputs = [self._content[node] for node in inputs]
        return self._meaning

    def _step(self, node: Node, position: int) -> None:
        if node.op != "call_function":  # an input, or a constant of the module
            self._memory.add(node, facts_of(node))
            name = position if node.op == "placeholder" else str(node.target)
            made = self._numbers.of(node.op, name)
            gather = (
                self._gathers.get(position - 1) if node.op == "placeholder" else None
            )
            if gather is not None:
                made = self._numbers.reduced(gather, self._numbers.read(made))
                self._meaning.messages[made] += 1
            self._begin(node, made)
            return
        facts = facts_of(node)
        roots = self._memory.add(node, facts)
        if is_wait(node):
            for root in roots:
                self._open.pop(root, None)
                self._sent.pop(root, None)
            (waited,) = node.all_input_nodes
            self._shape[node] = self._shape[waited]
            return
        if is_launch(node):
            self._launch(node)
            return
        # By memory: of a tensor and what wrote it, only one counts as a reader's input.
        reads = set(self._memory.of(reads_of(node, facts)))
        if num_elements(node):
            self._elements(node, reads)
            return
        args = self._args(node, reads)
        made = self._numbers.of(str(node.target), args)
        if facts.draws:
            self._meaning.drawn = made = self._numbers.of(made, self._meaning.drawn)
        for place, target in enumerate(facts.writes):
            self._write(node, target, made, place)
        if is_item(node):
            self._item(node, made)
        elif facts.aliases:
            shape = self._shape[facts.aliases[0]]
            self._shape[node] = shape if facts.writes else self._seen(node, shape, made)
        else:
            self._begin(node, made)

    def _elements(self, node: Node, reads: set[Root]) -> None:
        """An operator on lists is one for each element, however many it is given."""
        writes = set(facts_of(node).writes)
        for index in range(num_elements(node)):
            given = chosen(node, [index])
            made = self._numbers.of(str(node.target), self._args(node, reads, given))
            tensors = (a[0] for a in given[0] if isinstance(a, list) and a)
            written = (t for t in tensors if isinstance(t, Node) and t in writes)
            for place, target in enumerate(written):
                self._write(node, target, made, place)
            self._content[node, index] = made
            self._results[node, index] = self._numbers.of("whole", made)
        self._shape[node] = self._numbers.of("list", node.name)

    def _seen(self, node: Node, shape: int, made: int) -> int:
        """A view: a `detach` shows what it is given, two transposes do together."""
        name = facts_of(node).operator.name
        if name in ("detach", "alias"):
            return shape
        if name == "t":
            self._transposed[made] = shape
            return self._transposed.get(shape, made)
        return made

    def _begin(self, node: Node, made: int) -> None:
        self._content[node] = made
        self._shape[node] = self._numbers.of("whole", made)

    def _item(self, node: Node, made: int) -> None:
        (root, *_) = self._memory.of([node])
        source, index = node.args
        assert isinstance(source, Node) and isinstance(index, int)
        self._shape[node] = self._results.get((source, index), made)
        if root not in self._content:
            self._content[root] = self._numbers.of(self._content[source], index)

    def _launch(self, launch: Node) -> None:
        sent = [self._read(tensor, launch) for tensor in payload(launch)]
        for index, number in enumerate(sent):
            reduced = self._numbers.reduced(launch, number)
            self._meaning.messages[reduced] += 1
            root: Root = (launch, index) if is_coalesced(launch) else launch
            for own in facts_of(launch).aliases:  # all_reduce_: in its input
                (root,) = self._memory.of([own])
            self._content[root] = reduced
            self._open[root] = launch
            self._sent[root] = self._memory.of([payload(launch)[index]])
            self._shape[launch] = self._numbers.of("whole", reduced)
            self._results[launch, index] = self._shape[launch]

    def _write(self, node: Node, target: Node, made: int, place: int) -> None:
        for root in self._memory.of([target]):
            for result, sent in self._sent.items():
                if root == result or root in sent:
                    raise GraphError(
                        f"{node.name} writes {target.name} while "
                        f"{self._open[result].name} still sends it. Put the wait "
                        "before it."
                    )
            old = self._content[root]
            self._content[root] = self._numbers.of(
                made, place, old, self._shape[target]
            )

    def _read(self, value: Any, reader: Node) -> int:
        if not isinstance(value, Node):
            return self._numbers.of("constant", _plain(value))
        contents = []
        for root in self._memory.of([value]):
            if root in self._open:
                raise GraphError(
                    f"{reader.name} reads {value.name}, which {self._open[root].name} "
                    "has not finished. Let it read the wait_tensor's result, and stand "
                    "behind it."
                )
            contents.append(self._content[root])
        return self._numbers.of(self._shape[value], *contents)

    def _args(self, node: Node, reads: set[Root], given: Any = None) -> Hashable:
        def number(value: Any) -> Hashable:
            if isinstance(value, Node):
                read = not reads.isdisjoint(self._memory.of([value]))
                return self._read(value, node) if read else self._shape[value]
            return _plain(value)

        return _mapped(given or (node.args, node.kwargs), number)


def meaning(
    graph: Graph, numbers: Numbers, gathers: Mapping[int, Node] | None = None
) -> Meaning:
    """See [Note: equal values].

    Args:
        graph: what is followed.
        numbers: shared by the graphs that are compared.
        gathers: of inputs, by position, the collective that gathers them first.

    Raises:
        GraphError: a result is read before its wait or never waited for, or memory is
            written that is still being sent.
    """
    return _Reader(numbers, gathers or {}).follow(graph)


def _mapped(value: Any, change: Callable[[Any], Hashable]) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(_mapped(v, change) for v in value)
    if isinstance(value, dict):
        return tuple((k, _mapped(v, change)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return _mapped((value.start, value.stop, value.step), change)
    return change(value)


def _plain(value: Any) -> Hashable:
    """A constant: 1, 1.0 and True differ."""
    return type(value).__name__, str(value)
