"""Which line of the user's code made an autograd node.

Autograd numbers a thread's nodes as the forward pass makes them. Noted at each operator
that it follows, the numbers show in the backward pass whose node runs.
"""

from __future__ import annotations

import bisect

import torch


class ForwardLines:
    """The lines of one rank's forward operators, by autograd's numbers."""

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
