"""Readable Python for a graph, which runs by itself on every cluster.

The code is eager PyTorch in the order of the graph. Averages are made in place, in the
gradients' own memory, where that is nobody else's; what is not used any more is let go
at once, so that memory is what eager code would take. With a plan of streams each
message is packed and sent beside the computing.
"""

from __future__ import annotations

import itertools
import keyword
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.graphs import (
    check_graph,
    group_of,
    is_coalesced,
    is_item,
    is_launch,
    is_wait,
    launch_of,
    payload,
    returned,
    sent_bytes,
    waits,
)
from overlaplab.techniques.compiler.insertion import is_average
from overlaplab.techniques.compiler.naming import Naming, unpacking
from overlaplab.techniques.compiler.owning import find_owned
from overlaplab.techniques.compiler.runtime import GLOBALS, Generated, load
from overlaplab.techniques.compiler.side_stream import StreamPlan, check_streams


def generate(graph: Graph, name: str, plan: StreamPlan | None = None) -> Generated:
    """Python for `graph`, as a function called `name`.

    The function is given the process group of its averages; where they are of several,
    a mapping from names to groups. Other collectives keep the name of theirs.

    Args:
        graph: as the passes left it.
        name: "forward", "backward".
        plan: of `plan_streams`; None: all is launched from the current stream.

    Raises:
        GraphError: the plan leaves an edge between streams to chance.
    """
    if plan is not None:
        check_streams(graph, plan)
    check_graph(graph)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"name is {name!r}; expected a function's, such as 'backward'")
    writer = _Writer(graph, name, plan)
    return load(writer.write(), name, writer.naming.constants)


@dataclass
class _Line:
    """A statement, the variables that it uses, what to say, and where it runs."""

    code: str
    used: set[str]
    note: str = ""
    is_side: bool = False


class _Writer:
    """Writes one function, a line for each node that does anything."""

    def __init__(self, graph: Graph, name: str, plan: StreamPlan | None) -> None:
        self._graph = graph
        self._name = name
        self._plan = plan
        self._side = set(plan.side) if plan else set()
        self._groups = {group_of(n) for n in graph.nodes if is_average(n)}
        group = "groups" if len(self._groups) > 1 else "group"
        self._parameters = ["args", group, "device", *(["side"] if plan else [])]
        own = [*self._parameters, "main", name, *GLOBALS]
        self.naming = Naming(graph, own)
        self._variables = self.naming.variables
        self._lines: list[_Line] = []
        self._forks = itertools.count()
        self._read: dict[Node, set[str]] = {}  # by what is on the side, until a wait
        self._owned = find_owned(graph)

    def write(self) -> str:
        inputs = [n for n in self._graph.nodes if n.op == "placeholder"]
        names = [self.naming.variable(node) for node in inputs]
        waited: set[Node] = set()
        for node in self._graph.nodes:
            if node.op == "get_attr":
                self.naming.constant(node)
            elif node.op == "call_function":
                self._call(node, waited)
        results = [self.naming.literal(value) for value in returned(self._graph)]
        kept = {
            _variable(self._variables[v])
            for v in returned(self._graph)
            if isinstance(v, Node)
        }
        lines = [f"def {self._name}({', '.join(self._parameters)}):"]
        if names:
            lines += unpacking(names)
            lines.append("    args.clear()  # what is saved is freed at its last use")
        if self._side:
            lines.append("    main = streams.current_stream()")
        lines += self._body(set(names) - kept, kept)
        comma = "," if len(results) == 1 else ""
        lines.append(f"    return ({', '.join(results)}{comma})")
        return "\n".join(lines) + "\n"

    def _body(self, inputs: set[str], kept: set[str]) -> list[str]:
        """The lines, each with what it is the last to use let go."""
        last: dict[str, int] = dict.fromkeys(sorted(inputs), -1)
        for number, line in enumerate(self._lines):
            last |= dict.fromkeys(map(_variable, line.used), number)
        ends: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in kept and name not in self.naming.constants:
                ends.setdefault(number, []).append(name)
        lines = [f"    del {', '.join(ends[-1])}"] if -1 in ends else []
        is_side = False
        for number, line in enumerate(self._lines):
            if line.is_side and not is_side:
                lines += self._fork()
            is_side = line.is_side
            indent = "        " if is_side else "    "
            over = f"; del {', '.join(sorted(ends[number]))}" if number in ends else ""
            if line.note.startswith("#"):
                lines += [indent + line.note, f"{indent}{line.code}{over}"]
            else:
                note = f"  # {line.note}" if line.note else ""
                lines.append(f"{indent}{line.code}{over}{note}")
        return lines

    def _fork(self) -> list[str]:
        """From here on beside main, behind what main has launched so far."""
        ready = self.naming.new(f"ready_{next(self._forks)}")
        return [
            f"    {ready} = main.record_event()",
            "    with streams.stream(side):  # beside what main launches below",
            f"        side.wait_event({ready})  # else it reads too early",
        ]

    def _call(self, node: Node, waited: set[Node]) -> None:
        if is_wait(node) and is_average(launch := launch_of(node)):
            if launch not in waited:
                waited.add(launch)
                # Its tensors are used here, too: they are the averages from now on.
                used = {self._variables[wait] for wait in waits(launch)}
                used |= self._read.pop(launch, set())
                variable = self._variables[launch]
                self._lines.append(
                    _Line(f"{variable}.wait()", {variable} | used, self._wait_note())
                )
        elif is_average(node):
            self._average(node)
        elif is_item(node) and is_average(node.all_input_nodes[0]):
            pass  # the average's own tensors
        elif is_item(node):
            source, index = map(self.naming.literal, node.args)
            self._assign(node, f"{source}[{index}]")
        else:
            given = [self.naming.literal(value) for value in node.args]
            if is_launch(node):  # it sends memory as it lies
                sent = [self._variables[t] + _contiguous(t) for t in payload(node)]
                given[0] = f"[{', '.join(sent)}]" if is_coalesced(node) else sent[0]
            given += [f"{k}={self.naming.literal(v)}" for k, v in node.kwargs.items()]
            self._assign(node, f"{self.naming.target(node)}({', '.join(given)})")

    def _wait_note(self) -> str:
        return "# Main waits. Until here side may read what is let go." * bool(
            self._plan
        )

    def _assign(self, node: Node, code: str) -> None:
        used = {self._variables[source] for source in node.all_input_nodes}
        value: Any = node.meta.get("val")
        is_side = node.name in self._side
        if is_wait(node):
            used |= self._read.pop(launch_of(node), set())
        if is_side:
            self._reads(node, used)
        note = ""
        if isinstance(value, torch.Tensor):
            note = f"({', '.join(map(str, value.shape))})"
        if not node.users:  # for what it does, or for nothing
            self._lines.append(_Line(code, used, note, is_side))
            return
        variable = self.naming.variable(node)
        line = _Line(f"{variable} = {code}", used | {variable}, note, is_side)
        self._lines.append(line)

    def _reads(self, node: Node, used: set[str]) -> None:
        """See [Note: memory of two streams]: kept until the collective's wait."""
        found = set(used)
        for source in node.all_input_nodes:
            found |= self._read.get(source, set())
        self._read[node] = found

    def _average(self, launch: Node) -> None:
        before = [self._variables[tensor] for tensor in payload(launch)]
        is_side = launch.name in self._side
        variable = self.naming.new(launch.name)
        if is_side:
            self._reads(launch, set(before))
            sent, flat = self._packed(launch, before, variable)
        else:
            sent = flat = self._copied(launch, before)
        for wait in waits(launch):
            source = wait.all_input_nodes[0]
            index: Any = source.args[1] if is_item(source) else 0
            self._variables[wait] = self._variables[source] = sent[index]
        decision = launch.meta.get("decision")
        note = f"# {sent_bytes(launch):,} bytes" + (f"; {decision}" if decision else "")
        code = f"{variable} = average([{', '.join(flat)}], {self._group(launch)})"
        self._variables[launch] = variable
        self._lines.append(_Line(code, {variable, *sent, *flat}, note, is_side))

    def _group(self, launch: Node) -> str:
        several = len(self._groups) > 1
        return f"groups[{group_of(launch)!r}]" if several else "group"

    def _copied(self, launch: Node, before: list[str]) -> list[str]:
        """What is sent: the tensors themselves, or copies of those of others."""
        sent = []
        for tensor, variable in zip(payload(launch), before, strict=True):
            if tensor not in self._owned[launch]:
                original, variable = variable, self.naming.new(f"{variable}_copy")
                code = f"{original}.clone(memory_format=torch.contiguous_format)"
                line = _Line(f"{variable} = {code}", {original, variable})
                self._lines.append(line)
            sent.append(variable)
        return sent

    def _packed(
        self, launch: Node, before: list[str], name: str
    ) -> tuple[list[str], list[str]]:
        """The parts of one message, and that; one tensor of our own is a message."""
        if len(before) == 1 and self._owned[launch]:
            return before, before
        size = sum(tensor.meta["val"].numel() for tensor in payload(launch))
        flat, parts = (self.naming.new(f"{name}_{part}") for part in ("flat", "parts"))
        code = f"{flat} = {before[0]}.new_empty({size})"
        self._lines.append(_Line(code, {flat, before[0]}, "main's memory"))
        code = f"{parts} = pack([{', '.join(before)}], {flat})"
        self._lines.append(_Line(code, {flat, *before, parts}, is_side=True))
        return [f"{parts}[{i}]" for i in range(len(before))], [flat]


def _variable(code: str) -> str:
    """That of "parts[0]"."""
    return code.partition("[")[0]


def _contiguous(sent: Node) -> str:
    return "" if sent.meta["val"].is_contiguous() else ".contiguous()"
