"""What ranks print: a terminal obeys none of it.

Names and texts that a program prints may come from a file that somebody sent. Escape
characters and their like are therefore shown as text, as in the messages of errors and
in what ranks of the process clusters print. Newlines, tabs and carriage returns pass,
so a progress bar draws over itself as ever; in a rank no stream says that it is a
terminal, so programs that ask leave their colors out. Bytes (`.buffer`) pass as well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from overlaplab.cluster.virtual.patching import patched
from overlaplab.cluster.virtual.recorder import current_recorder
from overlaplab.errors import printable


@contextlib.contextmanager
def printing_text() -> Iterator[None]:
    """While open, `sys.stdout` and `sys.stderr` show what ranks print as text."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    with patched(
        (sys, name, _Stream(s)) for name, s in streams.items() if s is not None
    ):
        yield


class _Stream:
    """Stands in for a stream of the process; outside ranks it is that stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if current_recorder() is None or not isinstance(text, str):
            written: int = self._stream.write(text)
            return written
        self._stream.write("\r".join(map(printable, text.split("\r"))))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return current_recorder() is None and bool(self._stream.isatty())
