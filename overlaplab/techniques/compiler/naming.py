"""How values, operators and constants of a graph are called in generated code."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node


class Naming:
    """Names of one function, each taken once.

    Args:
        graph: whose nodes are named.
        taken: names that mean something else.

    Attributes:
        constants: what the code takes from outside, by name.
        variables: of nodes that were named.
    """

    def __init__(self, graph: Graph, taken: Iterable[str]) -> None:
        self._graph = graph
        self._taken = Counter(taken)
        self._home = _home_device(graph)
        self.constants: dict[str, Any] = {}
        self.variables: dict[Node, str] = {}

    def variable(self, node: Node) -> str:
        """The name of what `node` gives."""
        name = self.variables.get(node)
        if name is None:
            name = self.variables[node] = self.new(node.name)
        return name

    def new(self, wanted: str) -> str:
        """`wanted`, or something like it that is free."""
        self._taken[wanted] += 1
        number = self._taken[wanted]
        return wanted if number == 1 else self.new(f"{wanted}_{number}")

    def constant(self, node: Node) -> None:
        """Take what a `get_attr` node gives from the graph's module."""
        value: Any = self._graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        self.constants[self.variable(node)] = value

    def target(self, node: Node) -> str:
        """The operator of `node`."""
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
        name = self.new("".join(c if c.isalnum() else "_" for c in wanted))
        self.constants[name] = value
        return name

    def literal(self, value: Any) -> str:
        """Code for an argument."""
        if isinstance(value, Node):
            return self.variables[value]
        if isinstance(value, list | tuple):
            inside = ", ".join(map(self.literal, value))
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self.literal, parts))})"
        if isinstance(value, torch.device):
            return "device" if value == self._home else f"torch.{value!r}"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        return self._global(value, "constant")


def _home_device(graph: Graph) -> torch.device | None:
    """Of the first tensor: what the code calls `device`."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            device: torch.device = value.device
            return device
    return None


def unpacking(names: list[str]) -> list[str]:
    """The line that takes all inputs; where it is too long, a few names a line."""
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
