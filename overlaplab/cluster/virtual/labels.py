"""What is launched belongs to a label and to a step, as the program says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from overlaplab.timeline.span import NO_ATTRIBUTES, step_number


class Labels:
    """The labels that one rank is inside of, and its step."""

    def __init__(self) -> None:
        # Where a step began with it: with what operators got of a step before.
        self._labels: list[tuple[str, Mapping[str, Any] | None]] = []
        self._of_step: Mapping[str, Any] = NO_ATTRIBUTES  # what they get of a step
        self._step = 0  # the last one that began

    @property
    def label(self) -> str:
        """The innermost one."""
        return self._labels[-1][0] if self._labels else ""

    def enter_label(self, name: str) -> None:
        """What is launched from now on is called so; a step may begin."""
        number = step_number(name, self._step)
        self._labels.append((name, None if number is None else self._of_step))
        if number is not None:
            self.begin_step(number)

    def leave_label(self) -> None:
        """As it was before the last `enter_label`."""
        if self._labels:
            _, before = self._labels.pop()
            if before is not None:
                self._of_step = before

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
