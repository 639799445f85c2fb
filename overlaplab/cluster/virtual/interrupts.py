"""Ctrl-C while a run patches this process: it acts where nothing is left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """A Ctrl-C waits for `allowed`, or for the end; a second one does not."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler  # the caller's
        self._is_allowed = False
        self._waiting: tuple[int, FrameType | None] | None = None

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """While open it acts at once; one that waited acts now."""
        self._is_allowed = True
        try:
            self.act()
            yield
        finally:
            self._is_allowed = False

    def act(self) -> None:
        """Let one that waited act."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._handler(*waiting)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_allowed or self._waiting is not None:
            self._waiting = None
            self._handler(number, frame)
        else:
            self._waiting = number, frame


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """While open, a Ctrl-C is deferred; see `Interrupts`. Only main threads get one."""
    handler = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(handler)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, Interrupts):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupts.act()
