"""`course/build.py --check` on notebooks that somebody has touched."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_output

import build
import notebook_runs as runs

LESSON = """\
# %% name="given"
sizes = [3, 5]

# %% kind="exercise" exercise="6.1"
def plan(sizes):
    ### BEGIN SOLUTION
    return sum(sizes)
    ### END SOLUTION

# %% kind="check" exercise="6.1"
assert plan(sizes) == 8
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A built course; its solution is marked as executed, without a kernel."""
    path = tmp_path / "course" / "06_x.py"
    path.parent.mkdir()
    path.write_text(LESSON)
    cells = build.read_lesson(path)
    solution = build.make_solution(cells)
    for number, cell in enumerate(solution.cells, start=1):
        cell.execution_count = number
    runs.write(build.make_lab(cells), tmp_path / "labs" / "06_x.ipynb")
    runs.write(solution, tmp_path / "solutions" / "06_x.ipynb")
    build.check(tmp_path)
    return tmp_path


def edit(path: Path, change: Callable[[NotebookNode], object]) -> None:
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    runs.write(notebook, path)


def refusal(root: Path) -> str:
    with pytest.raises(build.BuildError) as caught:
        build.check(root)
    return str(caught.value)


def add_output(alt: str = "", **data: str) -> Callable[[NotebookNode], object]:
    named = {key.replace("_", "/", 1): value for key, value in data.items()}
    said = {"image/png": {"alt": alt}} if alt else {}
    output = new_output("display_data", data=named, metadata=said)
    return lambda notebook: notebook.cells[0].outputs.append(output)


@pytest.mark.parametrize("folder", ["labs", "solutions"])
@pytest.mark.parametrize(
    "change",
    [
        lambda notebook: notebook.cells[0].update(source="sizes = [3, 6]"),
        lambda notebook: notebook.cells[2].update(id="other"),
        lambda notebook: notebook.cells[2].metadata.nbgrader.update(points=100),
        lambda notebook: notebook.cells.pop(),
        lambda notebook: notebook.metadata.update(kernelspec={"name": "julia"}),
    ],
    ids=["source", "id", "points", "cell", "kernel"],
)
def test_an_edited_notebook_has_drifted(
    course: Path, folder: str, change: Callable[[NotebookNode], object]
) -> None:
    edit(course / folder / "06_x.ipynb", change)

    assert f"{folder}/06_x.ipynb is not what course/06_x.py gives" in refusal(course)


def test_an_edited_lesson_leaves_both_notebooks_behind(course: Path) -> None:
    (course / "course" / "06_x.py").write_text(LESSON.replace("3, 5", "5, 3"))

    said = refusal(course)
    assert "labs/06_x.ipynb" in said and "solutions/06_x.ipynb" in said


def test_an_output_in_a_lab_is_drift(course: Path) -> None:
    edit(course / "labs" / "06_x.ipynb", add_output(text_plain="8"))

    assert "labs/06_x.ipynb" in refusal(course)


def test_other_outputs_in_a_solution_are_no_drift(course: Path) -> None:
    picture = base64.b64encode(b"another matplotlib").decode()
    edit(course / "solutions" / "06_x.ipynb", add_output("a line", image_png=picture))

    build.check(course)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_output(image_png="A" * 200_000), "a picture over 100000 bytes"),
        (add_output(image_png="A"), "a figure without words (alt)"),
        (
            lambda notebook: notebook.cells[0].update(execution_count=None),
            "cell 'given': not executed",
        ),
        (
            lambda notebook: notebook.cells[0].outputs.append(
                new_output("error", ename="KeyError", evalue="", traceback=[])
            ),
            "stores an error, KeyError",
        ),
        (
            lambda notebook: notebook.cells[0].outputs.append(
                new_output("stream", text=f"reading {Path.home()}/x")
            ),
            "shows a path of this machine",
        ),
        (
            lambda notebook: notebook.cells[0].outputs.append(
                new_output("display_data", data={runs.WIDGETS: {}})
            ),
            "a widget's view",
        ),
    ],
)
def test_outputs_that_must_not_be_stored_are_refused(
    course: Path, change: Callable[[NotebookNode], object], reason: str
) -> None:
    edit(course / "solutions" / "06_x.ipynb", change)

    assert reason in refusal(course)


@pytest.mark.parametrize("folder", ["labs", "solutions"])
def test_a_missing_notebook_and_one_without_a_lesson_are_refused(
    course: Path, folder: str
) -> None:
    path = course / folder / "06_x.ipynb"
    path.rename(path.with_name("07_y.ipynb"))

    said = refusal(course)
    assert f"{folder}/06_x.ipynb" in said
    assert f"{folder}/07_y.ipynb has no lesson in course/" in said
