"""Deadlines in CPU time of the user's code: a busy machine takes none of it.

Once half of the time is over, the stack is looked at ten times a second, and what the
process computed since the last look is charged if the user's code is on it. Imports,
references and other processes are not charged. Code that sleeps or waits ends at a far
longer limit on the wall clock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from overlaplab.ours import is_users_file

F = TypeVar("F", bound=Callable[..., Any])

WALL_FACTOR = 10.0  # wall seconds for each second of CPU time
ALL_FACTOR = 3.0  # CPU seconds of anybody's code for each second of the user's
RANK_THREADS = "virtual rank "  # how the threads' names begin
_LOOK_S = 0.1
_FREE_SHARE = 0.5  # of the CPU time: until then nobody looks, and nothing is charged
_PATIENT_LOOKS = 10  # while what the user's code called has not returned

_interruptible: set[CodeType] = set()
_of_ranks: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def interruptible(function: F) -> F:
    """Mark a function of ours that waits for the user's code and may be stopped."""
    _interruptible.add(function.__code__)
    return function


def note_thread(thread: threading.Thread) -> None:
    """A rank has started `thread`: what it computes is the user's."""
    _of_ranks.add(thread)


class OutOfTimeError(BaseException):
    """Not an Exception: the user's `except Exception` must not eat it.

    It came `after` "30 s of computing", at a `place` (function and line of the user's
    code, "" if unknown); it is `judged`, unless a busy machine may be to blame.
    """

    def __init__(self, after: str, place: str, judged: bool) -> None:
        super().__init__(f"after {after}\n  {place}")
        self.after, self.place, self.judged = after, place, judged


class Deadline:
    """A context that stops what runs in it once the user's code has had its time.

    Works in the main thread, where there are signals; elsewhere nothing is stopped.
    The error is raised in the user's code, or in ours that waits for it; never in an
    import, which would be left half done.

    Args:
        cpu_s: CPU time of the user's code; on the wall, `WALL_FACTOR` times as much.

    Raises:
        OutOfTimeError: the time is over.
    """

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._wall_s = WALL_FACTOR * cpu_s
        self._charged_s = self._all_s = self._waited_s = 0.0
        self._late_looks = 0

    def __enter__(self) -> Deadline:
        main = threading.current_thread() is threading.main_thread()
        self._usable = main and hasattr(signal, "setitimer")
        if self._usable:
            is_users_file("")  # now: a look that reads files lets ranks go on meanwhile
            self._cpu, self._wall = time.process_time(), time.monotonic()
            self._caller = sys._getframe(1)
            self._handler = signal.signal(signal.SIGALRM, self._look)
            self._timer = signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
            self._began = self._wall
        return self

    def __exit__(self, *error: object) -> None:
        if self._usable:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            left_s, every_s = self._timer
            if left_s:  # another's, such as pytest's: it goes on
                left_s = max(left_s - (time.monotonic() - self._began), 0.001)
                signal.setitimer(signal.ITIMER_REAL, left_s, every_s)
            del self._caller

    def _look(self, signum: int, frame: FrameType | None) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        spent_s = cpu - self._cpu
        self._all_s += spent_s
        # A process that is stopped, or gets no turn, looks late: not its time.
        self._waited_s += min(wall - self._wall, 1.0)
        self._cpu, self._wall = cpu, wall
        free_s = _FREE_SHARE * self._cpu_s
        if self._all_s < free_s and self._waited_s < self._wall_s:
            return
        stacks = self._stacks(frame)
        importing = any(map(is_importing, stacks))
        places = [_users_place(stack) for stack in stacks]
        found = [place for place in places if place is not None]
        if found and not importing:
            self._charged_s += spent_s
        far_too_long = self._all_s >= ALL_FACTOR * self._cpu_s
        computed = far_too_long or self._charged_s >= self._cpu_s - free_s
        far_too_long |= self._waited_s >= self._wall_s
        if importing or not (computed or far_too_long):
            return
        self._late_looks += 1
        mine, waits = places[-1], frame is not None and frame.f_code in _interruptible
        at_once = waits or (mine is not None and mine[0] == 0)
        if at_once or ((found or far_too_long) and self._late_looks > _PATIENT_LOOKS):
            _, place = min(found, default=(0, ""))
            if computed:
                raise OutOfTimeError(f"{self._cpu_s:g} s of computing", place, True)
            after = f"{self._waited_s:.0f} s, most of them waiting"
            raise OutOfTimeError(after, place, not machine_is_busy())

    def _stacks(self, main: FrameType | None) -> list[Stack]:
        """Of ranks that the main thread waits for; last, what its caller called.

        A frame that is kept keeps what its function has let go: none outlives this.
        """
        own = stack_of(main, until=self._caller)
        ranks: list[Stack] = []
        if any(code in _interruptible for code, _ in own):
            threads = threading.enumerate()
            idents = {
                thread.ident
                for thread in threads
                if thread.name.startswith(RANK_THREADS) or thread in _of_ranks
            }
            frames = sys._current_frames()
            del frames[threading.get_ident()]  # this one: a circle, freed by gc alone
            ranks = [stack_of(f) for ident, f in frames.items() if ident in idents]
        return [*ranks, own]


Stack = list[tuple[CodeType, int]]


def stack_of(frame: FrameType | None, until: FrameType | None = None) -> Stack:
    """Code and line of the frame and of those that called it, from the innermost on."""
    stack = []
    while frame is not None and frame is not until:
        stack.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return stack


def is_importing(stack: Stack) -> bool:
    """Whether a module is being imported on this stack."""
    return any(c.co_filename.startswith("<frozen importlib") for c, _ in stack)


def _users_place(stack: Stack) -> tuple[int, str] | None:
    """(how many frames of others are on top of it, the user's innermost one)."""
    for depth, (code, line) in enumerate(stack):
        if is_users_file(code.co_filename):
            return depth, f"in {code.co_name}, line {line}"
    return None


def limit_process(cpu_s: float) -> None:
    """End this process after so much more CPU time, if its code cannot be stopped."""
    import resource  # absent on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    end = int(time.process_time() + ALL_FACTOR * cpu_s) + 10
    if hard == resource.RLIM_INFINITY or end < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (end, hard))


def machine_is_busy() -> bool:
    """Whether more wants to run than there are cores: the wall clock says nothing."""
    cores = os.cpu_count() or 1
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > cores
