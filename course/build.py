"""Write labs/ and solutions/ from the lessons in course/, and hold them to it.

    python course/build.py [06 ...]           write both notebooks of each lesson
    python course/build.py --check            fail where any of these has drifted
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
    # %% reference=true                          its solution is in labNN.reference
    # %% broken=true                             its stub is in labNN.broken
    # %% include="primers/fx_graphs.py"          an empty cell: the cells of that file,
                                                 which several lessons share

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

Code that a lab runs itself stands in the lesson too: the lab's module `reference` has
the functions and classes of the cells with reference=true, solved, and `broken` those
of the cells with broken=true, as the lab hands them out. A cell may have both keys. See
overlaplab_course/marked_cells.py.

Nothing here knows what a lesson teaches, or how a check decides.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

import notebook_runs as runs
from lesson_cells import Cell, lab_source, read_lesson, solution_source
from lesson_words import banned_words
from notebook_runs import BuildError

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
    """Write what each lesson gives; the solution's notebook is executed first."""
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
    """Compare notebooks on disk with what the lessons would give.

    Raises:
        BuildError: listing every difference.
    """
    if words := list(banned_words(root)):
        raise BuildError("\n".join(words))
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
