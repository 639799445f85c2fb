"""Read a lesson: its cells, their keys, and the blocks between their markers.

The format is described in build.py. Nothing here knows of notebooks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext

from notebook_runs import BuildError

KINDS = ("", "exercise", "check", "solution-only", "lab-only")
KEYS = {
    "kind",
    "exercise",
    "points",
    "name",
    "tags",
    "fold",
    "reference",
    "broken",
    "lines_to_next_cell",
}
MARKER = re.compile(r"^( *)### (BEGIN|END) (SOLUTION|STUB|HIDDEN TESTS)\s*$")
LOOKS_LIKE_MARKER = re.compile(
    r"#\s*(BEGIN|END)[ _-]*(SOLUTION|STUB|HIDDEN)", re.IGNORECASE
)


@dataclass(frozen=True)
class Block:
    """The lines between a pair of markers, or one run of lines outside of any."""

    name: str
    indent: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One cell of a lesson, as written.

    Args:
        where: lesson and number, for messages.
        id: stable; also nbgrader's grade_id.
        blocks: the source, cut at its markers.
    """

    where: str
    id: str
    type: str
    source: str
    kind: str
    exercise: str
    points: int
    tags: tuple[str, ...]
    fold: bool
    blocks: tuple[Block, ...]


def read_lesson(path: Path) -> list[Cell]:
    """Parse a lesson.

    Raises:
        BuildError: for a key, a kind or a marker that would be ignored silently.
    """
    cells: list[Cell] = []
    for where, cell in _raw_cells(path):
        cells.append(_cell(cell, where, cells))
    checked = {cell.exercise for cell in cells if cell.kind == "check"}
    if not checked:
        raise BuildError(f"{path.name}: no check; a lab without one proves nothing")
    for cell in cells:
        if cell.kind == "exercise" and cell.exercise not in checked:
            raise BuildError(f"{cell.where}: no check marks exercise {cell.exercise}")
    return cells


def _raw_cells(path: Path) -> Iterator[tuple[str, Any]]:
    """The cells of a file, and of those that it includes in their places."""
    raw = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent").cells
    for number, cell in enumerate(raw):
        where = f"{path.name}, cell {number}"
        if included := cell.metadata.get("include"):
            part = path.parent / str(included)
            others = set(cell.metadata) - {"include", "lines_to_next_cell"}
            if cell.source or others or not part.is_file():
                raise BuildError(
                    f"{where}: include={str(included)!r} stands in an empty cell, "
                    "without other keys, and names a file beside the lesson"
                )
            yield from _raw_cells(part)
        elif cell.cell_type != "raw" and (cell.source or cell.metadata):
            yield where, cell


def _cell(raw: Any, where: str, before: Sequence[Cell]) -> Cell:
    keys = dict(raw.metadata)
    if unknown := sorted(set(keys) - KEYS):
        raise BuildError(f"{where}: unknown keys {unknown}; known: {sorted(KEYS)}")
    kind, exercise = str(keys.get("kind", "")), str(keys.get("exercise", ""))
    if kind not in KINDS:
        raise BuildError(f"{where}: unknown kind {kind!r}; known: {KINDS[1:]}")
    if (kind in ("exercise", "check")) != bool(exercise):
        raise BuildError(
            f"{where}: kind {kind!r} with exercise {exercise!r}; an exercise and a "
            'check carry exercise="6.1", other cells do not'
        )
    if kind in ("exercise", "check") and raw.cell_type != "code":
        raise BuildError(f"{where}: an {kind} must be a code cell")
    blocks = tuple(cut(raw.source, where))
    if raw.cell_type != "code" and (keys.get("reference") or keys.get("broken")):
        raise BuildError(f"{where}: reference=true and broken=true are for code cells")
    if keys.get("broken") and "STUB" not in [block.name for block in blocks]:
        raise BuildError(f"{where}: broken=true without a stub")
    _refuse_misplaced(kind, blocks, where)
    return Cell(
        where=where,
        id=_cell_id(str(keys.get("name", "")), kind, exercise, raw, where, before),
        type=raw.cell_type,
        source=raw.source,
        kind=kind,
        exercise=exercise,
        points=int(keys.get("points", 1)),
        tags=tuple(keys.get("tags", ())),
        fold=bool(keys.get("fold", False)),
        blocks=blocks,
    )


def _cell_id(
    name: str, kind: str, exercise: str, raw: Any, where: str, before: Sequence[Cell]
) -> str:
    taken = {cell.id for cell in before}
    if exercise and not name:
        name = f"{kind}-{exercise.replace('.', '-')}"
    if name:
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
            raise BuildError(f"{where}: name {name!r} has letters that an id cannot")
        if name in taken:
            raise BuildError(f'{where}: id {name!r} is taken; give it name="..."')
        return name
    digest = hashlib.sha256(f"{raw.cell_type}\n{raw.source}".encode()).hexdigest()[:8]
    repeats = sum(old.startswith(digest) for old in taken)
    return f"{digest}-{repeats}" if repeats else digest


def cut(source: str, where: str) -> Iterator[Block]:
    """Cut a cell at its markers; lines outside of any form blocks named "".

    Raises:
        BuildError: for a marker without its partner, one within another, or a line
            that looks like a marker and is none.
    """
    opened, indent, lines = "", "", list[str]()
    for line in source.splitlines():
        marker = MARKER.match(line)
        if marker is None:
            if LOOKS_LIKE_MARKER.search(line):
                raise BuildError(
                    f"{where}: {line.strip()!r} looks like a marker; write "
                    "'### BEGIN SOLUTION' alone on its line"
                )
            lines.append(line)
            continue
        new_indent, edge, name = marker.groups()
        if (edge == "BEGIN") == bool(opened) or (edge == "END" and name != opened):
            inside = f"inside {opened}" if opened else "outside of any block"
            raise BuildError(f"{where}: unpaired '### {edge} {name}' {inside}")
        if opened or lines:
            yield Block(opened, indent, tuple(lines))
        opened, indent, lines = (name if edge == "BEGIN" else ""), new_indent, []
    if opened:
        raise BuildError(f"{where}: '### BEGIN {opened}' has no '### END {opened}'")
    if lines:
        yield Block("", "", tuple(lines))


def _refuse_misplaced(kind: str, blocks: Sequence[Block], where: str) -> None:
    names = [block.name for block in blocks]
    if kind == "exercise" and "SOLUTION" not in names:
        raise BuildError(f"{where}: an exercise without '### BEGIN SOLUTION'")
    for name, home in (
        ("SOLUTION", "exercise"),
        ("STUB", "exercise"),
        ("HIDDEN TESTS", "check"),
    ):
        if name in names and kind != home:
            raise BuildError(f"{where}: {name} belongs in a cell of kind {home!r}")
    for i, block in enumerate(blocks):
        if block.name == "STUB":
            if "SOLUTION" not in (*names[max(i - 1, 0) : i], *names[i + 1 : i + 2]):
                raise BuildError(f"{where}: a stub stands right beside its solution")
            for line in block.lines:
                if line.strip() and not line.lstrip().startswith("#"):
                    raise BuildError(f"{where}: stub line {line!r} is no comment")
        if block.name == "SOLUTION" and not any(line.strip() for line in block.lines):
            raise BuildError(f"{where}: an empty solution")


def lab_source(cell: Cell) -> str:
    """The cell's text for the learner: solutions out, stubs opened, no markers."""
    lines: list[str] = []
    names = ["", *(block.name for block in cell.blocks), ""]
    for i, block in enumerate(cell.blocks, start=1):
        if block.name == "":
            lines += block.lines
        elif block.name == "STUB":
            lines += [re.sub(r"^(\s*)# ?", r"\1", line) for line in block.lines]
        elif block.name == "SOLUTION" and "STUB" not in (names[i - 1], names[i + 1]):
            lines += [
                f"{block.indent}# YOUR CODE HERE",
                f'{block.indent}raise NotImplementedError("{cell.exercise}")',
            ]
    return "\n".join(lines).rstrip()


def solution_source(cell: Cell) -> str:
    """The solved cell: solutions between their markers, stubs out."""
    lines: list[str] = []
    for block in cell.blocks:
        if block.name == "":
            lines += block.lines
        elif block.name != "STUB":
            lines += [
                f"{block.indent}### BEGIN {block.name}",
                *block.lines,
                f"{block.indent}### END {block.name}",
            ]
    return "\n".join(lines).rstrip()
