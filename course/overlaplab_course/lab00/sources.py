"""Lines of the learner's, as the learner knows them: "your cell, line 8: if x > 0:".

A cell of a notebook is a file with a number for its name; nobody can find that.
"""

from __future__ import annotations

import linecache
import os
import re

_CELL = re.compile(r"(?:\b\d{5,}\.py|<ipython-input-[^>]*>):(\d+)")


def readable(text: str) -> str:
    """Say "your cell, line 8" where `text` names a cell's file and line."""
    return _CELL.sub(r"your cell, line \1", text)


def line_of(source: str) -> str:
    """The line at `source` ("FILE:8 in train"), with its text where it can be found."""
    place, _, function = source.partition(" in ")
    name, _, number = place.rpartition(":")
    text = ""
    for path in tuple(linecache.cache):
        if os.path.basename(path) == name:
            text = linecache.getline(path, int(number)).strip()
    if text:
        return f"{readable(place)}: {text}"
    return f"{readable(place)} in {function}"
