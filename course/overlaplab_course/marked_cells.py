"""The course's own code for a lab: marked cells of its lesson, run as a module.

A grader runs the course's solution of an exercise, and the broken program of a repair.
Both stand in the lesson, course/NN_topic.py, and nowhere else: a lab's `reference` has
what the cells with `reference=true` define, solved; its `broken` what those with
`broken=true` define, as the lab hands them out. Knows a lesson's markers, which
course/build.py describes, and nothing of what it teaches.
"""

from __future__ import annotations
import __future__

import ast
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MARKER = re.compile(r" *### (BEGIN|END) (SOLUTION|STUB)$")
# A lesson may annotate with names of its lab, which are not all there yet.
_FLAGS = __future__.annotations.compiler_flag


def define_marked(module: dict[str, Any]) -> None:
    """Define what marked cells define, with what they use of the lesson's imports.

    Each line keeps its number in the lesson, in errors and in the record of a run.

    Args:
        module: the namespace of `overlaplab_course.labNN.reference`, or of `.broken`.

    Raises:
        LookupError: no cell is marked so, or none defines a function or a class.
    """
    _, lab, mark = module["__name__"].split(".")
    lesson = lesson_of(lab)
    text = lesson.read_text("utf-8")
    source = "\n".join(_marked_lines(text, mark))
    definitions = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    if not definitions:
        raise LookupError(f"{lesson}: no cell with {mark}=true defines anything")
    imports = _imports(text, "\n".join(map(ast.unparse, definitions)))
    # No such file: what lies there would be taken for the lines that stand below.
    file = str(Path(__file__).parent / lab / mark / lesson.name)
    module["__file__"] = file  # where `inspect` looks for classes
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    tree = ast.Module([*imports, *definitions], type_ignores=[])
    exec(compile(tree, file, "exec", _FLAGS, dont_inherit=True), module)


def lesson_of(lab: str) -> Path:
    """The lesson of "lab06": in a wheel beside the labs, else where it is edited."""
    here = Path(__file__).parent
    for folder in (here / "lessons", here.parent):
        for path in folder.glob(f"{lab.removeprefix('lab')}_*.py"):
            return path
    raise LookupError(f"no lesson of {lab} in {here / 'lessons'} or {here.parent}")


def _marked_lines(text: str, mark: str) -> Iterator[str]:
    """Every line of a lesson; those outside of marked cells are empty."""
    marked, block = False, ""
    for line in text.splitlines():
        if line.startswith("# %%"):
            marked = f" {mark}=true" in line
        if not marked:
            yield ""
        elif edge := _MARKER.match(line):
            block = edge[2] if edge[1] == "BEGIN" else ""
            yield ""
        elif mark == "broken" and block == "SOLUTION":
            yield ""
        elif mark == "broken" and block == "STUB":
            yield re.sub(r"^(\s*)# ?", r"\1", line)
        else:
            yield line


def _imports(text: str, used: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """The lesson's own imports of names that stand in `used`."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [
                alias
                for alias in node.names
                if re.search(rf"\b{re.escape(alias.asname or alias.name)}\b", used)
            ]
            if node.names:
                yield node
