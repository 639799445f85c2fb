"""What a lab's `reference` and `broken` take from the marked cells of its lesson."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
import linecache
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import build
from build import BuildError
from overlaplab_course import marked_cells

COURSE = Path(marked_cells.__file__).parent
LESSON = """\
# %% name="setup"
import math
import statistics
import torch.distributed as dist
from overlaplab_course import lab06 as lab

# %% name="given" reference=true
def half(x: lab.NotYetThere):
    return x / math.inf

# %% kind="exercise" exercise="6.1" reference=true broken=true
def send(grads, total):
    sent = []
    ### BEGIN SOLUTION
    for grad in grads:  # each alone
        sent.append(half(grad))
    ### END SOLUTION
    ### BEGIN STUB
    # sent.append(grads)  # all of them
    ### END STUB
    return sent

answer = send([], 0)

# %% kind="check" exercise="6.1"
assert send

def unmarked():
    pass
"""


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "06_x.py"
    path.write_text(LESSON)
    monkeypatch.setattr(marked_cells, "lesson_of", lambda lab: path)
    return path


def defined(mark: str) -> dict[str, Any]:
    module = {"__name__": f"overlaplab_course.lab06.{mark}"}
    marked_cells.define_marked(module)
    return {name: thing for name, thing in module.items() if not name.startswith("__")}


def test_a_reference_has_what_marked_cells_define_and_imports_what_that_uses(
    lesson: Path,
) -> None:
    made = defined("reference")
    assert list(made) == ["math", "lab", "half", "send"]
    assert made["send"]([2.0, 3.0], 0) == [0.0, 0.0]


def test_a_broken_program_is_what_the_lab_hands_out(lesson: Path) -> None:
    made = defined("broken")
    assert list(made) == ["send"]
    assert made["send"]([2.0, 3.0], 0) == [[2.0, 3.0]]


@pytest.mark.parametrize("mark", ["reference", "broken"])
def test_lines_have_their_numbers_in_the_lesson(lesson: Path, mark: str) -> None:
    code = defined(mark)["send"].__code__
    assert code.co_firstlineno == 1 + LESSON.splitlines().index(
        "def send(grads, total):"
    )
    assert Path(code.co_filename) == COURSE / "lab06" / mark / "06_x.py"


def test_a_run_finds_the_text_of_a_line(lesson: Path) -> None:
    """As handed out: no comment stands where the stub does."""
    code = defined("broken")["send"].__code__
    stub = 1 + LESSON.splitlines().index("    # sent.append(grads)  # all of them")
    told = linecache.getline(code.co_filename, stub)
    assert told == "    sent.append(grads)  # all of them\n"


def test_the_text_of_a_class_and_of_a_function_is_found() -> None:
    lab05 = importlib.import_module("overlaplab_course.lab05.broken")
    assert inspect.getsource(lab05.Alder).startswith("class Alder:\n")
    lab06 = importlib.import_module("overlaplab_course.lab06.reference")
    assert inspect.getsource(lab06.finish).startswith("def finish(state")


def test_a_lesson_whose_marked_cells_define_nothing_is_refused(lesson: Path) -> None:
    lesson.write_text(LESSON.replace(" broken=true", ""))
    with pytest.raises(LookupError, match="no cell with broken=true defines anything"):
        defined("broken")


def test_a_lab_without_a_lesson_is_refused() -> None:
    with pytest.raises(LookupError, match="no lesson of lab97 in"):
        marked_cells.lesson_of("lab97")


LESSONS = build.find_lessons(COURSE.parents[1])
MODULES = sorted(
    f"{path.parent.name}.{path.stem}"
    for mark in ("reference", "broken")
    for path in COURSE.glob(f"lab*/{mark}.py")
)


def test_a_lab_has_a_module_for_each_mark_of_its_lesson() -> None:
    marks = {
        f"lab{lesson.name[:2]}.{mark}"
        for lesson in LESSONS
        for mark in ("reference", "broken")
        if any(
            line.startswith("# %%") and f" {mark}=true" in line
            for line in lesson.read_text("utf-8").splitlines()
        )
    }
    assert sorted(marks) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_what_marked_cells_define_runs_by_itself(name: str) -> None:
    """It uses no name that the lesson alone has."""
    module = importlib.import_module(f"overlaplab_course.{name}")
    own = [x for x in vars(module).values() if _module_of(x) == module.__name__]
    used = {name for thing in own for name in _globals_of(thing)}
    assert used <= {*vars(module), *dir(builtins)}


@pytest.mark.parametrize("name", MODULES)
def test_marked_cells_define_each_name_once(name: str) -> None:
    lab, _, mark = name.partition(".")
    text = marked_cells.lesson_of(lab).read_text("utf-8")
    nodes = ast.parse("\n".join(marked_cells._marked_lines(text, mark))).body
    kinds = ast.FunctionDef | ast.ClassDef
    names = Counter(node.name for node in nodes if isinstance(node, kinds))
    assert [name for name, often in names.items() if often > 1] == []


def _module_of(thing: object) -> str:
    return getattr(thing, "__module__", "")


def _globals_of(thing: Any) -> Iterator[str]:
    """Names that a function, a class or code looks up in its module."""
    if isinstance(thing, type):
        for member in vars(thing).values():
            yield from _globals_of(member)
    code = getattr(thing, "__code__", thing)
    if isinstance(code, types.CodeType):
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                yield instruction.argval
        for constant in code.co_consts:
            yield from _globals_of(constant)


def test_keys_of_a_cell_do_not_reach_the_notebooks(lesson: Path) -> None:
    cells = build.read_lesson(lesson)
    for notebook in (build.make_lab(cells), build.make_solution(cells)):
        assert not any(
            {"reference", "broken"} & set(c.metadata) for c in notebook.cells
        )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("### BEGIN STUB", "### BEGIN SOLUTION", "broken=true without a stub"),
        ('# %% name="given"', "# %% [markdown]", "are for code cells"),
    ],
)
def test_a_mark_that_means_nothing_is_refused(
    lesson: Path, old: str, new: str, reason: str
) -> None:
    text = LESSON.replace(old, new)
    if "SOLUTION" in new:
        text = text.replace("### END STUB", "### END SOLUTION")
    lesson.write_text(text)
    with pytest.raises(BuildError, match=reason):
        build.read_lesson(lesson)
