"""Finds what would compute with weights that are not there, in the graph of a step.

Weights are in their slot in a unit's forward, and again from the moment when the
gradient of something that it returned arrives. Elsewhere the slot has other values, and
the result would be wrong without a sign. Two kinds of that are found here:

- a weight that is used outside its unit's forward, as in `F.linear(x, head.weight)` or
  a penalty over `model.parameters()`;
- something made in a forward that reaches the loss and was not returned, as in
  `self.penalty = ...`, if its gradient comes before that of what was returned.

Only graphs are read: a weight that is used frozen or detached is not found. Knows
nothing of rings and plans; the first steps are enough for a program that repeats them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from overlaplab.techniques.model_facts import ParameterInfo


class _Unit(Protocol):
    """What is read of a unit."""

    name: str
    parameters: tuple[ParameterInfo, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """One forward of a unit, by the numbers that autograd gives to its nodes.

    Args:
        unit: whose.
        numbers: of all nodes that were made in it.
        returned: of those that made what it returned.
    """

    unit: _Unit
    numbers: range
    returned: frozenset[int]


class Windows:
    """When units were in their forward, and whether a graph keeps to it.

    Attributes:
        is_open: forwards are noted and backwards are checked.
    """

    def __init__(self) -> None:
        self.begin(False)

    def begin(self, is_open: bool) -> None:
        """A step begins; nothing was noted."""
        self.is_open = is_open
        self._of: dict[int, tuple[_Unit, str, list[range]]] = {}
        self._forwards: list[_Forward] = []
        self._begins: list[int] = []
        self._checked = -1

    def note(self, unit: _Unit, begin: int, made: Iterable[int], again: bool) -> None:
        """A forward made the nodes from `begin` to now.

        Args:
            unit: whose.
            begin: number of its first node.
            made: numbers of the nodes of what it returned.
            again: in a backward pass, whose thread may count by itself.
        """
        numbers = range(begin, number_of_node())
        for info in unit.parameters:
            entry = self._of.setdefault(id(info.parameter), (unit, info.name, []))
            entry[2].append(numbers)
        if not again:
            self._forwards.append(_Forward(unit, numbers, frozenset(made)))
            self._begins.append(begin)

    def check_backward(self) -> None:
        """Check the graph of the running backward pass, once."""
        number = torch._C._current_graph_task_id()
        if self.is_open and number != self._checked:
            self._checked = number
            self.check(_roots())

    def check(self, out: object) -> None:
        """Raise RuntimeError if the graph of tensors in `out` does not keep to it."""
        found = [
            (-1, t.grad_fn)
            for t in tree_leaves(out)
            if isinstance(t, Tensor) and t.grad_fn is not None
        ]
        seen: set[Any] = set()
        first: dict[_Forward, int] = {}  # of what was returned, the last that was made
        escaped: list[tuple[_Forward, int]] = []
        while found:
            user, node = found.pop()
            parameter = getattr(node, "variable", None)
            if parameter is not None:
                self._check_use(parameter, user)
                continue
            number = number_of(node)
            if forward := self._forward_of(number):
                using = self._forward_of(user)
                if number in forward.returned:
                    first[forward] = max(number, first.get(forward, -1))
                elif using is None or using.unit is not forward.unit:
                    escaped.append((forward, number))
            if node not in seen:
                seen.add(node)
                found += [(number, n) for n, _ in node.next_functions if n is not None]
        for forward, number in escaped:
            if number > first.get(forward, -1):
                raise RuntimeError(
                    f"the backward of unit {forward.unit.name} would begin without its "
                    "weights: the loss takes a tensor out of it that its forward did "
                    "not return, or that was changed in place as a view. Return "
                    "every tensor that reaches the loss, in lists, tuples or dicts."
                )

    def _check_use(self, parameter: Tensor, user: int) -> None:
        if id(parameter) not in self._of:
            return
        unit, name, windows = self._of[id(parameter)]
        if not any(user in window for window in windows):
            raise RuntimeError(
                f"parameter {name} is used outside the forward of its unit "
                f"{unit.name}, where its values are gone. Give units without it: "
                "Zero3(model, units=[...])."
            )

    def _forward_of(self, number: int) -> _Forward | None:
        at = bisect_right(self._begins, number) - 1
        if at >= 0 and number in self._forwards[at].numbers:
            return self._forwards[at]
        return None


def number_of(node: Any) -> int:
    """By which autograd orders the nodes of a backward pass, the largest first."""
    return int(node._sequence_nr())


def _roots() -> Any:
    """Where the running backward pass began; nothing if that cannot be seen.

    On the CPU it runs in the thread that asked for it, and for a GPU in one of its own
    while that thread waits.
    """
    code = torch.autograd.graph._engine_run_backward.__code__
    frame: FrameType | None
    for frame in (sys._getframe(), *sys._current_frames().values()):
        asked = None
        while frame is not None:
            if frame.f_code is code:
                asked = frame  # the outermost: others are of checkpoints inside
            frame = frame.f_back
        if asked is not None:
            return asked.f_locals["t_outputs"]
    return ()


number_of_node = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
