"""Constructions that lessons do not use, from words.toml; the builder refuses them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path


def banned_words(root: Path) -> Iterator[str]:
    """One line for each banned construction in the lessons and pages of course/.

    A sentence is found also where it goes on in the next line.
    """
    folder = root / "course"
    if not (folder / "words.toml").exists():
        return
    table = tomllib.loads((folder / "words.toml").read_text(encoding="utf-8"))
    # Gaps may be three characters wide where a line was joined.
    rules = [
        (re.compile(ban["pattern"].replace(" ", r"\s+"), re.I), ban["instead"])
        for ban in table["banned"]
    ]
    texts = ("[0-9][0-9]_*.py", "primers/*.py", "*.md")
    for path in sorted(path for text in texts for path in folder.glob(text)):
        text = path.read_text(encoding="utf-8")
        flat = re.sub(r"\n# (?=\S)", lambda gap: " " * len(gap[0]), text)
        for pattern, instead in rules:
            for found in pattern.finditer(flat):
                line = text.count("\n", 0, found.start()) + 1
                said = " ".join(found[0].split())
                yield f"{path.name}, line {line}: {said!r}; say instead: {instead}"
