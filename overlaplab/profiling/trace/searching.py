"""Searches that end: some regular expressions need longer than anybody lives.

Python can interrupt a search by a signal, and signals arrive in main threads only. So
another thread's search runs in the main thread of a child, which waits for the next.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import weakref
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
    """Whether a pattern is found in a name, within `SEARCH_S` of CPU time.

    Args:
        pattern: a regular expression; case is ignored.

    Raises:
        re.error, OverflowError, RecursionError: it is none.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._search = re.compile(pattern, re.IGNORECASE).search
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __call__(self, name: str) -> bool:
        """Search.

        Raises:
            ValueError: it takes longer.
        """
        found: bool | None
        if not hasattr(signal, "setitimer"):  # Windows: there is no limit
            return self._search(name) is not None
        if threading.current_thread() is threading.main_thread():
            found = self._here(name)
        else:
            with self._lock:
                found = self._elsewhere(name)
        if found is None:
            raise ValueError(
                f"communication={self._pattern!r} takes more than {SEARCH_S} s of CPU "
                f"time on {name[:60]!r}: it repeats what repeats. Expected a part of "
                "some kernels' names, without nested or many '*' and '+'"
            )
        return found

    def _here(self, name: str) -> bool | None:
        before = signal.signal(signal.SIGVTALRM, _stop)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SEARCH_S)
            return self._search(name) is not None
        except TimeoutError:
            return None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    def _elsewhere(self, name: str) -> bool | None:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            weakref.finalize(self, _end, self._child)
            self._ask([self._pattern, SEARCH_S])
        self._ask(name)
        assert self._child.stdout is not None
        found: bool | None = json.loads(self._child.stdout.readline())
        return found

    def _ask(self, what: Any) -> None:
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()


def _stop(number: int, frame: object) -> None:
    raise TimeoutError


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()
