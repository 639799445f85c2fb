"""How a verdict is written: where in the learner's cell, and how wide."""

from __future__ import annotations

import re
import textwrap

WIDTH = 95  # columns; a notebook's output has a little more

# A cell of a notebook is a file with a number for its name; nobody can find that.
_FILE = r"(?:(?:/[^\s:,]*/)?\b\d{5,}\.py|<ipython-input-[^>]*>)"
_CELL = re.compile(_FILE + r":(\d+)")
_LINE_OF_CELL = re.compile(r"(?:file |in )?[\"']?" + _FILE + r"[\"']?, line (\d+)")


def readable(text: str) -> str:
    """Say "your cell, line 8" where `text` names a cell's file and line."""
    text = _CELL.sub(r"your cell, line \1", text)
    return _LINE_OF_CELL.sub(r"your cell, line \1", text)


def fold(title: str, text: str, *, indent: int = 6) -> list[str]:
    """Lines of at most `WIDTH` columns: `title`, and `text` hanging beside it.

    Lines of `text` stay lines, with what they are indented by; what is too long goes on
    below, further in if there are several.

    Args:
        title: before the first line, "seen:     ".
        text: of any number of lines.
        indent: of the title.
    """
    found = []
    lead = " " * indent + title
    lines = text.splitlines() or [""]
    further_in = 2 if len(lines) > 1 else 0
    for line in lines:
        words = line.lstrip(" ")
        lead += " " * (len(line) - len(words))
        hang = " " * (len(lead) + further_in)
        if len(lead) + len(words) <= WIDTH:
            found.append((lead + words).rstrip())
        else:
            found += textwrap.wrap(
                words,
                WIDTH,
                initial_indent=lead,
                subsequent_indent=hang,
                break_long_words=False,
                break_on_hyphens=False,
            )
        lead = " " * (indent + len(title))
    return found
