"""Searches that end: some regular expressions need longer than anybody lives.

Python can interrupt a search by a signal, and signals arrive in main threads only. So
the main thread of a child searches, and waits for the next name.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

SEARCH_S = 1.0  # of CPU time, a search

# What the child does: a line in, a line out, until nobody asks any more.
_CHILD = """
import json, re, signal, sys
pattern, seconds = json.loads(sys.stdin.readline())
search = re.compile(pattern, re.IGNORECASE).search
def stop(number, frame):
    raise TimeoutError
signal.signal(signal.SIGVTALRM, stop)
for line in sys.stdin:
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        found = bool(search(json.loads(line)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TimeoutError:
        found = None
    print(json.dumps(found), flush=True)
"""


class LimitedSearch:
    """Is a pattern found in a name, case ignored, within `SEARCH_S` of CPU time?

    Raises:
        re.error, OverflowError, RecursionError: it is no regular expression.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._search = re.compile(pattern, re.IGNORECASE).search
        self._child: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def __call__(self, name: str) -> bool:
        """Search.

        Raises:
            ValueError: it takes longer.
        """
        if not hasattr(signal, "setitimer"):  # Windows: there is no limit
            return self._search(name) is not None
        with self._lock:
            try:
                found = self._ask(name)
            except BaseException:  # an interrupt: what it answers now, nobody asked
                if self._end is not None:
                    self._end()
                self._child = None
                raise
        if found is None:
            raise ValueError(
                f"communication={self._pattern!r} takes more than {SEARCH_S} s of CPU "
                f"time on {name[:60]!r}: it repeats what repeats. Expected a part of "
                "some kernels' names, without nested or many '*' and '+'"
            )
        return found

    def _ask(self, name: str) -> bool | None:
        child = self._child
        lines: list[Any] = [name]
        if child is None:
            command = [sys.executable, "-I", "-S", "-c", _CHILD]
            how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            how["process_group"] = 0  # a terminal interrupts its group: not this one
            child = self._child = subprocess.Popen(command, **how, text=True)
            self._end = weakref.finalize(self, _end, child)
            lines.insert(0, [self._pattern, SEARCH_S])
        assert child.stdin is not None and child.stdout is not None
        child.stdin.writelines(json.dumps(line) + "\n" for line in lines)
        child.stdin.flush()
        found: bool | None = json.loads(child.stdout.readline())
        return found


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()
