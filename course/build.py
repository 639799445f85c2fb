"""Write labs/ and solutions/ from the lessons in course/, and hold them to it.

    python course/build.py [06 ...]           write both notebooks of each lesson
    python course/build.py --check            fail where a notebook has drifted
    python course/build.py --prove-unsolved   run labs as handed out: the checks, all
                                              of them and nothing else, must raise

A lesson is course/NN_topic.py in jupytext's percent format, the only place where it is
edited. The file as it stands is the *solved* lesson and runs from top to bottom.

Cells. `# %% [markdown]` and `# %%` go into both notebooks, unless a key says otherwise:

    # %% kind="exercise" exercise="6.1"          the learner edits it; has a solution
    # %% kind="check" exercise="6.1" points=2    marks it; locked; points default to 1
    # %% kind="solution-only"                    (also [markdown]) left out of the lab
    # %% kind="lab-only"                         (also [markdown]) left out of the other
    # %% tags=["raises-exception"]               nbconvert's and nbval's tags are kept
    # %% name="plan"                             the cell's id
    # %% fold=true                               JupyterLab folds its code away

Ids are stable: the name, else kind and exercise ("check-6-1"), else a hash of the text.

Inside an exercise, in nbgrader's spelling, paired, each on a line of its own:

    def plan(sizes):
        ### BEGIN SOLUTION
        return [sizes]
        ### END SOLUTION

The lab has "# YOUR CODE HERE" and a NotImplementedError in that place, or else the
stub that stands right before or after it, as comments that the build opens up:

    ### BEGIN STUB
    # return sizes    # a broken program to repair, or a start
    ### END STUB

The solution notebook keeps the SOLUTION markers and drops the stub. BEGIN/END HIDDEN
TESTS, in a check, is left out of the lab. A hint folds: <details><summary>Hint
</summary> ... </details> in Markdown.

Nothing here knows what a lesson teaches, or how a check decides.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

import notebook_runs as runs
from notebook_runs import BuildError

KINDS = ("", "exercise", "check", "solution-only", "lab-only")
KEYS = {"kind", "exercise", "points", "name", "tags", "fold", "lines_to_next_cell"}
MARKER = re.compile(r"^( *)### (BEGIN|END) (SOLUTION|STUB|HIDDEN TESTS)\s*$")
LOOKS_LIKE_MARKER = re.compile(
    r"#\s*(BEGIN|END)[ _-]*(SOLUTION|STUB|HIDDEN)", re.IGNORECASE
)
LESSON = re.compile(r"^\d\d_[a-z0-9_]+\.py$")
KERNEL = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}
# So many lines of a solution in a row, outside it, are a leak; fewer may be chance.
LEAK_LINES = 3
LEAK_CHARACTERS = 24


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
    raw = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent").cells
    cells: list[Cell] = []
    for number, cell in enumerate(raw):
        if cell.cell_type != "raw" and (cell.source or cell.metadata):
            cells.append(_cell(cell, f"{path.name}, cell {number}", cells))
    checked = {cell.exercise for cell in cells if cell.kind == "check"}
    if not checked:
        raise BuildError(f"{path.name}: no check; a lab without one proves nothing")
    for cell in cells:
        if cell.kind == "exercise" and cell.exercise not in checked:
            raise BuildError(f"{cell.where}: no check marks exercise {cell.exercise}")
    return cells


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


def make_lab(cells: Sequence[Cell]) -> NotebookNode:
    """The learner's notebook: stubs, no outputs.

    Raises:
        BuildError: where text of a solution is left in it.
    """
    kept = [cell for cell in cells if cell.kind != "solution-only"]
    lab = _notebook([_node(cell, lab_source(cell)) for cell in kept])
    _refuse_leaks(cells, lab)
    return lab


def make_solution(cells: Sequence[Cell]) -> NotebookNode:
    """The solved notebook, not yet executed."""
    kept = [cell for cell in cells if cell.kind != "lab-only"]
    return _notebook([_node(cell, solution_source(cell)) for cell in kept])


def _notebook(nodes: list[NotebookNode]) -> NotebookNode:
    notebook: NotebookNode = nbformat.v4.new_notebook(cells=nodes, metadata=KERNEL)
    nbformat.validate(notebook)
    return notebook


def _node(cell: Cell, source: str) -> NotebookNode:
    metadata: dict[str, Any] = {}
    tags = list(cell.tags)
    if cell.kind in ("exercise", "check"):
        check = cell.kind == "check"
        tags.append(cell.kind)
        metadata["overlaplab"] = {"exercise": cell.exercise}
        metadata["nbgrader"] = {
            "cell_type": "code",
            "grade": check,
            "grade_id": cell.id,
            "locked": check,
            "schema_version": 3,
            "solution": not check,
            "task": False,
        } | ({"points": cell.points} if check else {})
    if tags:
        metadata["tags"] = tags
    if cell.fold:
        metadata["jupyter"] = {"source_hidden": True}
    make: Any = nbformat.v4.new_markdown_cell
    if cell.type == "code":
        make = nbformat.v4.new_code_cell
    node: NotebookNode = make(source, id=cell.id, metadata=metadata)
    return node


def _refuse_leaks(cells: Sequence[Cell], lab: NotebookNode) -> None:
    shown = [_significant(node.source) for node in lab.cells]
    for cell in cells:
        secrets = [
            b.lines for b in cell.blocks if b.name in ("SOLUTION", "HIDDEN TESTS")
        ]
        if cell.kind == "solution-only" and cell.type == "code":
            secrets.append(tuple(cell.source.splitlines()))
        for secret in secrets:
            lines = _significant("\n".join(secret))
            size = min(LEAK_LINES, len(lines))
            for i in range(len(lines) - size + 1):
                window = lines[i : i + size]
                if sum(map(len, window)) < LEAK_CHARACTERS:
                    continue
                for text, node in zip(shown, lab.cells, strict=True):
                    if any(text[j : j + size] == window for j in range(len(text))):
                        raise BuildError(
                            f"{cell.where}: its solution stands in the lab, in cell "
                            f"{node.id!r}: {window[0]!r}"
                        )


def _significant(source: str) -> list[str]:
    """Lines without indent, comment sign, blank ones and those of one word."""
    lines = (" ".join(line.lstrip(" #").split()) for line in source.splitlines())
    return [line for line in lines if " " in line or "(" in line]


def find_lessons(root: Path, topics: Sequence[str] = ()) -> list[Path]:
    """The lessons whose names start with one of `topics`; all of them without.

    Raises:
        BuildError: where there is none.
    """
    lessons = sorted(p for p in (root / "course").glob("*.py") if LESSON.match(p.name))
    chosen = [p for p in lessons if not topics or p.name.startswith(tuple(topics))]
    if not chosen:
        wanted = f"that starts with {', '.join(topics)}" if topics else "NN_topic.py"
        raise BuildError(f"nothing to build: no lesson {wanted} in {root / 'course'}")
    return chosen


def build(root: Path, topics: Sequence[str] = ()) -> None:
    """Write both notebooks of each lesson; the solution's is executed first."""
    for lesson in find_lessons(root, topics):
        cells = read_lesson(lesson)
        lab, solution = make_lab(cells), make_solution(cells)
        runs.write(lab, root / "labs" / f"{lesson.stem}.ipynb")
        print(f"{lesson.name}: running the solution", flush=True)
        try:
            runs.execute_solution(solution, root / "solutions", root)
        except BuildError as error:
            raise BuildError(f"{lesson.name}, solved: {error}") from None
        runs.write(solution, root / "solutions" / f"{lesson.stem}.ipynb")


def check(root: Path) -> None:
    """Compare the notebooks on disk with what the lessons would give.

    Raises:
        BuildError: listing every difference.
    """
    problems: list[str] = []
    lessons = find_lessons(root)
    for lesson in lessons:
        cells = read_lesson(lesson)
        lab = root / "labs" / f"{lesson.stem}.ipynb"
        if not lab.exists() or lab.read_text("utf-8") != runs.text(make_lab(cells)):
            problems.append(f"labs/{lab.name} is not what course/{lesson.name} gives")
        path = root / "solutions" / f"{lesson.stem}.ipynb"
        if not path.exists():
            problems.append(f"solutions/{path.name} is missing")
            continue
        solution = nbformat.read(path, as_version=4)
        problems += runs.stored_problems(solution, f"solutions/{path.name}", root)
        if runs.text(runs.without_outputs(solution)) != runs.text(make_solution(cells)):
            problems.append(
                f"solutions/{path.name} is not what course/{lesson.name} gives"
            )
    stems = {lesson.stem for lesson in lessons}
    for folder in ("labs", "solutions"):
        for path in sorted((root / folder).glob("*.ipynb")):
            if path.stem not in stems:
                problems.append(f"{folder}/{path.name} has no lesson in course/")
    if problems:
        raise BuildError("\n".join([*problems, "Run: python course/build.py"]))
    print(f"{len(lessons)} lesson(s): labs and solutions are what course/ gives")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 for a course that is not in order, 0 otherwise."""
    parser = argparse.ArgumentParser(description="Build the course's notebooks.")
    parser.add_argument("topics", nargs="*", help="only lessons that start so: 06")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="fail on drift")
    mode.add_argument(
        "--prove-unsolved",
        action="store_true",
        help="fail unless the labs raise at their checks and nowhere else",
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    try:
        if options.check:
            check(root)
        elif options.prove_unsolved:
            runs.prove_unsolved(root / "labs", options.topics)
        else:
            build(root, options.topics)
    except BuildError as error:
        print(f"course/build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
