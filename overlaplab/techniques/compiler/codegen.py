"""Readable Python for a graph, which runs by itself on every cluster.

The code is eager PyTorch in the order of the graph. Averages are made in place, in the
gradients' own memory, where that is nobody else's; what is not used any more is let go
at once, so that memory is what eager code would take.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.techniques.compiler.graphs import (
    group_of,
    is_item,
    is_launch,
    is_wait,
    launch_of,
    operation,
    payload,
    returned,
    sent_bytes,
    waits,
)
from overlaplab.techniques.compiler.insertion import AVERAGE
from overlaplab.techniques.compiler.owning import find_owned
from overlaplab.techniques.compiler.runtime import average

_numbers = itertools.count()


@dataclass(frozen=True)
class Generated:
    """Code for a graph.

    Args:
        source: of a function of (args, group, device): a list of the graph's inputs,
            which it empties; the process group; where it makes new tensors.
        run: that function; it returns a tuple.
        constants: what the source takes from the graph's module, by name.
    """

    source: str
    run: Callable[..., tuple[Any, ...]]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.source


def generate(graph: Graph, name: str) -> Generated:
    """Python for `graph`, as a function called `name`.

    All of its averages are of one process group, which the function is given. Other
    collectives keep the name of theirs.

    Args:
        graph: as the passes left it.
        name: "forward", "backward".

    Raises:
        ValueError: averages are of more than one group.
    """
    writer = _Writer(graph, name)
    source = writer.write()
    filename = f"<overlaplab {name} {next(_numbers)}>"
    # So that tracebacks, and the record's source lines, show it.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    names: dict[str, Any] = {
        "torch": torch,
        "aten": torch.ops.aten,
        "operator": operator,
        "average": average,
        **writer.constants,
    }
    exec(compile(source, filename, "exec"), names)
    return Generated(source, names[name], writer.constants)


class _Writer:
    """Writes one function, a line for each node that does anything."""

    def __init__(self, graph: Graph, name: str) -> None:
        self._graph = graph
        self._name = name
        self.constants: dict[str, Any] = {}
        self._variables: dict[Node, str] = {}
        self._taken: Counter[str] = Counter(["args", "group", "device", name])
        self._lines: list[tuple[str, set[str], str]] = []  # code, what it uses, note
        self._owned = find_owned(graph)
        self._home = _home_device(graph)
        averages = {group_of(n) for n in graph.nodes if _is_average(n)}
        if len(averages) > 1:
            raise ValueError(
                f"averages are of the groups {sorted(averages)}; expected one, which "
                "the code is given"
            )

    def write(self) -> str:
        inputs = [n for n in self._graph.nodes if n.op == "placeholder"]
        names = [self._variable(node) for node in inputs]
        waited: set[Node] = set()
        for node in self._graph.nodes:
            if node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node, waited)
        results = [self._literal(value) for value in returned(self._graph)]
        kept = {
            self._variables[v] for v in returned(self._graph) if isinstance(v, Node)
        }
        lines = [f"def {self._name}(args, group, device):"]
        if names:
            lines += _unpacking(names)
            lines.append("    args.clear()  # what is saved is freed at its last use")
        lines += self._body(set(names) - kept, kept)
        comma = "," if len(results) == 1 else ""
        lines.append(f"    return ({', '.join(results)}{comma})")
        return "\n".join(lines) + "\n"

    def _body(self, inputs: set[str], kept: set[str]) -> list[str]:
        """The lines, each with what it is the last to use let go."""
        last: dict[str, int] = dict.fromkeys(sorted(inputs), -1)
        for number, (_, used, _) in enumerate(self._lines):
            last |= dict.fromkeys(used, number)
        ends: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in kept and name not in self.constants:
                ends.setdefault(number, []).append(name)
        lines = [f"    del {', '.join(ends[-1])}"] if -1 in ends else []
        for number, (code, _, note) in enumerate(self._lines):
            over = f"; del {', '.join(sorted(ends[number]))}" if number in ends else ""
            if note.startswith("#"):
                lines += [f"    {note}", f"    {code}{over}"]
            else:
                lines.append(f"    {code}{over}" + (f"  # {note}" if note else ""))
        return lines

    def _call(self, node: Node, waited: set[Node]) -> None:
        if is_wait(node) and _is_average(launch := launch_of(node)):
            if launch not in waited:
                waited.add(launch)
                # Its tensors are used here, too: they are the averages from now on.
                used = {self._variables[wait] for wait in waits(launch)}
                variable = self._variables[launch]
                self._lines.append((f"{variable}.wait()", {variable} | used, ""))
        elif _is_average(node):
            self._average(node)
        elif is_item(node) and _is_average(node.all_input_nodes[0]):
            pass  # the average's own tensors
        elif is_item(node):
            source, index = node.args
            code = f"{self._literal(source)}[{self._literal(index)}]"
            self._assign(node, code)
        else:
            given = [self._literal(value) for value in node.args]
            given += [f"{k}={self._literal(v)}" for k, v in node.kwargs.items()]
            self._assign(node, f"{self._target(node)}({', '.join(given)})")

    def _assign(self, node: Node, code: str) -> None:
        used = {self._variables[source] for source in node.all_input_nodes}
        value: Any = node.meta.get("val")
        note = f"({', '.join(map(str, value.shape))})" if _is_tensor(value) else ""
        if not node.users:  # for what it does, or for nothing
            self._lines.append((code, used, note))
            return
        variable = self._variable(node)
        self._lines.append((f"{variable} = {code}", used | {variable}, note))

    def _average(self, launch: Node) -> None:
        sent = []
        for tensor in payload(launch):
            variable = self._variables[tensor]
            if tensor not in self._owned[launch]:
                variable, original = self._new_name(f"{variable}_copy"), variable
                code = f"{original}.clone(memory_format=torch.contiguous_format)"
                self._lines.append((f"{variable} = {code}", {original, variable}, ""))
            sent.append(variable)
        for wait in waits(launch):
            source = wait.all_input_nodes[0]
            index: Any = source.args[1] if is_item(source) else 0
            self._variables[wait] = self._variables[source] = sent[index]
        variable = self._new_name(launch.name)
        decision = launch.meta.get("decision")
        note = f"# {sent_bytes(launch):,} bytes" + (f"; {decision}" if decision else "")
        code = f"{variable} = average([{', '.join(sent)}], group)"
        self._variables[launch] = variable
        self._lines.append((code, {variable, *sent}, note))

    def _constant(self, node: Node) -> None:
        value: Any = self._graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        self.constants[self._variable(node)] = value

    def _variable(self, node: Node) -> str:
        name = self._variables.get(node)
        if name is None:
            name = self._variables[node] = self._new_name(node.name)
        return name

    def _new_name(self, wanted: str) -> str:
        self._taken[wanted] += 1
        number = self._taken[wanted]
        return wanted if number == 1 else self._new_name(f"{wanted}_{number}")

    def _target(self, node: Node) -> str:
        target: Any = node.target
        if hasattr(target, "overloadpacket"):
            text = str(target)  # "aten.mm.default"
            return text if text.startswith("aten.") else f"torch.ops.{text}"
        name = getattr(target, "__name__", "")
        if getattr(operator, name, None) is target:
            return f"operator.{name}"
        return self._global(target, name or "function")

    def _global(self, value: Any, wanted: str) -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        name = self._new_name("".join(c if c.isalnum() else "_" for c in wanted))
        self.constants[name] = value
        return name

    def _literal(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._variables[value]
        if isinstance(value, list | tuple):
            inside = ", ".join(map(self._literal, value))
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._literal, parts))})"
        if isinstance(value, torch.device):
            return "device" if value == self._home else f"torch.{value!r}"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        return self._global(value, "constant")


def _is_average(node: Node) -> bool:
    return (
        is_launch(node) and operation(node) == "all_reduce" and node.args[1] == AVERAGE
    )


def _home_device(graph: Graph) -> torch.device | None:
    """Of the first tensor: what the code calls `device`."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if _is_tensor(value):
            device: torch.device = value.device
            return device
    return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _unpacking(names: list[str]) -> list[str]:
    """One line where it fits, else a few names a line."""
    line = f"    {', '.join(names)}, = args"
    if len(line) <= 88:
        return [line]
    lines, row = ["    ("], "       "
    for name in names:
        if len(row) + len(name) + 2 > 88:
            lines.append(row)
            row = "       "
        row += f" {name},"
    return [*lines, row, "    ) = args"]
