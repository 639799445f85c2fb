"""Where in the user's code an operator was launched, or the forward of its node was."""

from __future__ import annotations

import bisect
import os
import re
import sys
from functools import cache
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch

from overlaplab import ours

_SKIPPED = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *ours.folders(),
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
    "<",
)
# How torch.fx calls the files of the code that it generates, each another number.
_GRAPH = "<eval_with_key>"
# Where AOTAutograd has its node that stands for a whole graph.
_AOT = os.path.join(
    os.path.dirname(torch.__file__),
    "_functorch",
    "_aot_autograd",
    "runtime_wrappers.py",
)
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')  # in a node's stack
_graphs: dict[str, dict[int, str]] = {}


def user_line(frame: FrameType | None = None) -> str:
    """ "file:line in function" of the innermost frame of the user's, or "".

    Looks outwards from `frame`, from the caller if it is None.

    Frames of torch, of this package and of the standard library are not the user's.
    The file is given without its folder, so that records of two machines are equal.
    """
    return place(sys._getframe(1) if frame is None else frame).line


class Place(NamedTuple):
    """Where an operator was launched."""

    line: str  # as `user_line`
    # the line that the running node of a graph was traced from: of what was compiled,
    # where it was written. "" where no graph runs, or does not say
    traced: str = ""
    trains: bool = False  # the graph is a forward pass that autograd knows as a whole


def place(frame: FrameType | None = None) -> Place:
    """Of `frame`, or of the caller if it is None; looks outwards from there."""
    if frame is None:
        frame = sys._getframe(1)
    line, traced, in_graph = "", "", False
    while frame is not None:  # a dozen frames at each operator
        code = frame.f_code
        kind = _kind(code.co_filename)
        if not kind:
            pass
        elif kind == "user":
            line = line or _line(code.co_filename, frame.f_lineno, code.co_name)
            if not in_graph:  # whose backend may have put code of the user's around it
                break
        elif kind == "AOT":
            if code.co_name == "forward":
                line = line or (user_line(frame.f_back) if frame.f_back else "")
                return Place(line, traced, True)
        elif not in_graph:
            in_graph, traced = True, _line_of_node(frame)
        frame = frame.f_back
    return Place(line, traced)


@cache
def _kind(filename: str) -> Literal["user", "AOT", "graph", ""]:
    """What a frame of a file may say; "": nothing, as of most."""
    if is_users(filename):
        return "user"
    if filename == _AOT:
        return "AOT"
    return "graph" if filename.startswith(_GRAPH) else ""


def _line_of_node(frame: FrameType) -> str:
    """Where the node was traced whose line a graph's generated code is at."""
    lines = _graphs.get(frame.f_code.co_filename)
    if lines is None:
        values = frame.f_locals
        graph = values.get("self")
        if isinstance(values, dict):  # Python 3.11, 3.12: the frame keeps it
            values.clear()
        lines = _graphs[frame.f_code.co_filename] = _lines_of_graph(graph)
    return lines.get(frame.f_lineno, "")


def _lines_of_graph(graph: Any) -> dict[int, str]:
    """By the lines of its generated code."""
    numbers = getattr(graph, "_lineno_map", None)
    if numbers is None:
        return {}
    nodes, lines = list(graph.graph.nodes), {}
    for line, node in numbers.items():
        if node is not None and node < len(nodes):
            places = _PLACE.findall(nodes[node].stack_trace or "")
            users = [place for place in places if is_users(place[0])]
            if users:
                file, at, function = users[-1]
                lines[line + graph._prologue_start] = _line(file, int(at), function)
    return lines


@cache
def is_users(filename: str) -> bool:
    """Whether it is neither torch's, nor ours, nor the standard library's."""
    return filename.startswith("<ipython-input") or not filename.startswith(_SKIPPED)


@cache
def _line(filename: str, line: int, function: str) -> str:
    return f"{os.path.basename(filename)}:{line} in {function}"


class ForwardLines:
    """The lines of one rank's forward operators, by autograd's numbers.

    Autograd numbers a thread's nodes as the forward pass makes them. Noted at each
    operator that it follows, the numbers show in the backward pass whose node runs.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []  # the next node's, after the operator's own
        self._lines: list[str] = []

    def note(self, line: str) -> None:
        """An operator that autograd follows is launched at `line`."""
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._lines.append(line)

    def of_node(self) -> str:
        """The line that made the node which runs now, "" outside a backward pass and
        for the accumulation of a leaf's gradient."""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        at = bisect.bisect_right(self._numbers, node._sequence_nr())
        return self._lines[at] if at < len(self._lines) else ""
