"""Where in the user's code an operator was launched, or the forward of its node was."""

from __future__ import annotations

import bisect
import os
import sys
from types import CodeType, FrameType

import torch

from overlaplab import ours

_SKIPPED = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *ours.folders(),
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
    "<",
)
_is_user: dict[str, bool] = {}
_lines: dict[tuple[str, int, str], str] = {}


def user_line(frame: FrameType | None = None) -> str:
    """ "file:line in function" of the innermost frame of the user's, or "".

    Looks outwards from `frame`, from the caller if it is None.

    Frames of torch, of this package and of the standard library are not the user's.
    The file is given without its folder, so that records of two machines are equal.
    """
    if frame is None:
        frame = sys._getframe(1)
    known = _is_user
    while frame is not None:  # a dozen frames at each operator
        code = frame.f_code
        users = known.get(code.co_filename)
        if users or (users is None and is_user_code(code)):
            return _line(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return ""


def is_user_code(code: CodeType) -> bool:
    """Whether it is neither torch's, nor ours, nor the standard library's."""
    filename = code.co_filename  # the hash of a code object is slow
    users = _is_user.get(filename)
    if users is None:
        users = _is_user[filename] = _of_user(filename)
    return users


def _line(filename: str, line: int, function: str) -> str:
    key = (filename, line, function)
    text = _lines.get(key)
    if text is None:
        text = f"{os.path.basename(filename)}:{line} in {function}"
        _lines[key] = text
    return text


def _of_user(filename: str) -> bool:
    if filename.startswith("<ipython-input"):
        return True
    return not filename.startswith(_SKIPPED)


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
