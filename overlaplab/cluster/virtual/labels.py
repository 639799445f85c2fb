"""What is launched belongs to a label and to a step, as the program says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from overlaplab.timeline.span import NO_ATTRIBUTES, step_number


class Labels:
    """The labels that one rank is inside of, and its step."""

    def __init__(self) -> None:
        # With what operators got of a step outside of it.
        self._labels: list[tuple[str, Mapping[str, Any]]] = []
        self._of_step: Mapping[str, Any] = NO_ATTRIBUTES  # what they get of a step
        self._step = 0  # the last one that began

    @property
    def label(self) -> str:
        """The innermost one."""
        return self._labels[-1][0] if self._labels else ""

    def enter_label(self, name: str) -> None:
        """What is launched from now on is called so; a step may begin."""
        self._labels.append((name, self._of_step))
        number = step_number(name, self._step)
        if number is not None:
            self.begin_step(number)

    def leave_label(self) -> None:
        """As it was before the last `enter_label`."""
        if self._labels:
            _, self._of_step = self._labels.pop()

    def begin_step(self, number: int) -> Callable[[], None]:
        """What is launched is of step `number` until the result is called. A step
        inside another is a part of that."""
        outer = self._of_step
        if not outer:
            self._step = number
            self._of_step = MappingProxyType({"step": number})

        def end() -> None:
            self._of_step = outer

        return end
