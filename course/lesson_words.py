"""Constructions that no learner reads, from words.toml; the builder refuses them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

LESSONS = ("[0-9][0-9]_*.py", "primers/*.py", "*.md")
# Code that prints for learners, and the tables that it prints from.
PRINTED = ("course/overlaplab_course", "overlaplab/grading")


def banned_words(root: Path) -> Iterator[str]:
    """One line for each banned construction in what learners read.

    That is the lessons and pages of course/, and every string of the code that prints
    for them. A sentence is found also where it goes on in the next line.
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
    for name, line, text in _texts(root):
        for pattern, instead in rules:
            for found in pattern.finditer(text):
                at = line + text.count("\n", 0, found.start())
                said = " ".join(found[0].split())
                yield f"{name}, line {at}: {said!r}; say instead: {instead}"


def _texts(root: Path) -> Iterator[tuple[str, int, str]]:
    """Each text: its file, the line where it begins, and what it says."""
    folder = root / "course"
    for path in sorted(path for glob in LESSONS for path in folder.glob(glob)):
        text = path.read_text(encoding="utf-8")
        # A comment that goes on is one text; the joint keeps the lines' numbers.
        yield path.name, 1, re.sub(r"\n# (?=\S)", "\n  ", text)
    for package in PRINTED:
        for path in sorted((root / package).rglob("*.toml")):
            text = path.read_text(encoding="utf-8").replace("\\\n", " \n")
            yield str(path.relative_to(root)), 1, text
        for path in sorted((root / package).rglob("*.py")):
            name, parts = str(path.relative_to(root)), set[ast.AST]()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts.update(node.values)
                    said = (getattr(part, "value", "") for part in node.values)
                    text = "".join(s if isinstance(s, str) else "{}" for s in said)
                    yield name, node.lineno, text
                elif isinstance(node, ast.Constant) and node not in parts:
                    yield name, node.lineno, str(node.value)
