"""Where a rank was in the user's code: frames of an exception or of a hanging process.

The source lines are looked up in the parent, which alone knows a notebook's cells.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sys
from dataclasses import dataclass
from traceback import format_list, walk_tb
from types import TracebackType

from overlaplab import ours

_MACHINERY = tuple(
    ours.folders()[0] + name for name in ("cluster", "profiling", "streams.py")
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_shown(self) -> bool:
        """The user's, or of a technique that the user can read."""
        return ours.is_users_file(self.file) or (
            ours.is_our_file(self.file) and not self.file.startswith(_MACHINERY)
        )

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        code = f": `{source}`" if source else ""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}{code}"


def frames_of(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """The frames of an exception that a user wants to see, outermost first."""
    codes = [(frame.f_code, line) for frame, line in walk_tb(traceback)]
    frames = [Frame(code.co_filename, line, code.co_name) for code, line in codes]
    return tuple(frame for frame in frames if frame.is_shown)


def format_frames(frames: tuple[Frame, ...]) -> str:
    """The frames as Python prints a traceback."""
    rows = [(frame.file, frame.line, frame.function, None) for frame in frames]
    return "".join(format_list(rows)).rstrip("\n")


def location(dump: str, main_thread: int) -> Frame | None:
    """The user's innermost frame in a stack dump of faulthandler, which has each
    thread's most recent call first. `main_thread` is the one that runs the user's
    function: on CUDA, backward passes run hooks in other threads; those count after
    it."""
    stacks: dict[int, list[Frame]] = {}
    stack: list[Frame] = []
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            stack = stacks.setdefault(int(match[1], 16), [])
        elif match := _FRAME.match(line):
            stack.append(Frame(match[1], int(match[2]), match[3]))
    ordered = [stacks.pop(main_thread, []), *stacks.values()]
    for frame in itertools.chain(*ordered):
        if ours.is_users_file(frame.file):
            return frame
    return None


def newest_change_s() -> float:
    """Newest modification time of the user's modules that are imported here: a worker
    keeps what it has imported.

    Seconds since the epoch, 0 if there are none. Libraries do not count.
    """
    newest = 0.0
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not ours.is_users_file(file):
            continue
        try:
            newest = max(newest, os.stat(file).st_mtime)
        except OSError:  # moved away since
            continue
    return newest
