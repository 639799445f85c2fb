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
    rules = [(re.compile(b["pattern"], re.I), b["instead"]) for b in table["banned"]]
    texts = ("[0-9][0-9]_*.py", "primers/*.py", "*.md")
    for path in sorted(path for text in texts for path in folder.glob(text)):
        text = path.read_text(encoding="utf-8")
        flat = re.sub(r"\n# (?=\S)", lambda gap: " " * len(gap[0]), text)
        for pattern, instead in rules:
            # Gaps may be three characters wide where a line was joined.
            wide = re.compile(pattern.pattern.replace(" ", r"\s+"), re.I)
            for found in wide.finditer(flat):
                line = text.count("\n", 0, found.start()) + 1
                said = " ".join(found[0].split())
                yield f"{path.name}, line {line}: {said!r}; say instead: {instead}"
