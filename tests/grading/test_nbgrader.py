"""nbgrader: labs are released as they are, and the judge's verdicts are the marks.

Where nbgrader is installed a class of three goes through the real thing; elsewhere, as
in CI, that test is skipped: `pip install nbgrader`, then run this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_output
from traitlets.config import Config

from overlaplab.errors import NotebookError
from overlaplab.grading import find_exercise
from overlaplab.grading.children import Judge
from overlaplab.grading.nbgrader import judge_checks
from tests.grading.test_notebook import ANSWER, COUNTER, DOUBLE, MODULES
from tests.guards import GUARD_S

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "course" / "nbgrader_config.py"
PATCHED = (
    "import overlaplab.grading as grading\n"
    "check = grading.check = grading.judging.check = lambda *a: 'passed'\n"
)


def settings() -> Config:
    """What the configuration that we ship sets."""
    config = Config()
    exec(compile(CONFIG.read_text(), CONFIG, "exec"), {"get_config": lambda: config})
    return config


def cell(source: str, name: str, *, check: bool, **metadata: Any) -> Any:
    nbgrader = {"grade": check, "solution": not check, "grade_id": name, "points": 2}
    return new_code_cell(source, metadata={"nbgrader": nbgrader, **metadata})


def lab98(first: str = "factor = 2") -> Any:
    cells = [new_code_cell(first)]
    for name, solution in (("98.1", DOUBLE), ("98.2", COUNTER), ("98.3", ANSWER)):
        cells.append(cell(solution, f"exercise-{name}", check=False))
        source = f"check('{name}', object())"
        cells.append(cell(source, f"check-{name}", check=True))
    return nbformat.v4.new_notebook(cells=cells)


def marks(notebook: Any) -> dict[str, bool]:
    """By nbgrader's rule: a marked cell has its points if it shows no error."""
    return {
        cell.metadata.nbgrader.grade_id: not any(
            output.output_type == "error" or output.get("name") == "stderr"
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.metadata.get("nbgrader", {}).get("grade")
    }


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(MODULES) as running:
        yield running


@pytest.fixture
def autograde(tmp_path: Path, judge: Judge) -> Callable[[Any], Any]:
    def run(notebook: Any) -> Any:
        nbformat.write(notebook, tmp_path / "lab.ipynb")
        resources = {"metadata": {"path": str(tmp_path), "name": "lab"}}
        return judge_checks(notebook, resources, judge=judge)[0]

    return run


def test_a_solved_notebook_earns_every_check_and_shows_the_verdicts(autograde) -> None:
    graded = autograde(lab98())
    assert marks(graded) == {"check-98.1": True, "check-98.2": True, "check-98.3": True}
    assert "98.1 Double: passed" in graded.cells[2].outputs[0].text


@pytest.mark.parametrize("first", ["factor = 3", PATCHED + "factor = 3"])
def test_a_patched_check_earns_what_the_code_does(autograde, first: str) -> None:
    graded = autograde(lab98(first))
    assert marks(graded) == {
        "check-98.1": False,
        "check-98.2": True,
        "check-98.3": True,
    }
    assert "98.1 Double: not yet" in graded.cells[2].outputs[0].text


def test_what_a_cell_brings_or_says_of_itself_earns_nothing(autograde) -> None:
    """Outputs, the tag that keeps a cell from running, and another exercise's name."""
    notebook = lab98("factor = 3")
    first = notebook.cells[2]
    first.outputs = [new_output("execute_result", data={"text/plain": "2"})]
    first.metadata |= {"tags": ["skip-execution"], "overlaplab": {"exercise": "98.2"}}
    assert not marks(autograde(notebook))["check-98.1"]


def test_a_check_of_another_lab_earns_nothing(autograde) -> None:
    notebook = lab98()
    notebook.cells.append(cell("check('6.1', plan)", "check-6.1", check=True))
    graded = autograde(notebook)
    assert not marks(graded)["check-6.1"] and marks(graded)["check-98.1"]
    assert "6.1: this notebook is another lab's" in graded.cells[-1].outputs[0].text


def test_what_could_not_be_judged_is_neither_right_nor_wrong(
    autograde, monkeypatch
) -> None:
    from overlaplab.grading.children import Outcome

    monkeypatch.setattr(
        Judge, "judge", lambda *_, **__: Outcome(None, "busy", judged=False)
    )
    with pytest.raises(NotebookError, match=r"98\.1, 98\.2, 98\.3 could not be judged"):
        autograde(lab98())


def test_a_marked_cell_that_nobody_ran_is_refused(autograde) -> None:
    """nbgrader gives it all its points, since it shows no error."""
    notebook = lab98()
    notebook.cells.append(cell("assert double(2) == 5", "mine", check=True))
    with pytest.raises(NotebookError, match="cell 'mine' is marked, is no check of a"):
        autograde(notebook)
    notebook.cells[-1].execution_count = 7
    notebook.cells[-1].outputs = [new_output("error", ename="AssertionError")]
    assert not marks(autograde(notebook))["mine"]


def test_the_configuration_releases_labs_as_they_are_and_asks_the_judge() -> None:
    config = settings()
    assert config.ClearSolutions.enabled is False
    first, *others = config.Autograde.autograde_preprocessors
    assert first == "overlaplab.grading.nbgrader.judge_checks"
    assert not any("Execute" in name for name in others)
    assert any("SaveAutoGrades" in name for name in others)


def test_nbgraders_points_are_those_of_overlaplab_grade() -> None:
    wrong = [
        (path.name, cell.id)
        for path in sorted((ROOT / "labs").glob("*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        if cell.metadata.get("nbgrader", {}).get("grade")
        if cell.metadata.nbgrader.points
        != find_exercise(cell.metadata.overlaplab.exercise).points
    ]
    assert wrong == []


LAB = "01_overlap_arithmetic"


def nbgrader(course: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "nbgrader", *arguments]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=course,
        env=os.environ | {"PATH": path},  # it calls alembic by its name
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class of three: solved, half solved, and a cheat who patches the check."""
    pytest.importorskip("nbgrader")
    course = tmp_path_factory.mktemp("course")
    (course / CONFIG.name).write_text(CONFIG.read_text())
    source = course / "source" / "lab"
    source.mkdir(parents=True)
    name = f"{LAB}.ipynb"
    (source / name).write_text((ROOT / "labs" / name).read_text())
    nbgrader(course, "generate_assignment", "lab")
    released = nbformat.read(course / "release" / "lab" / name, as_version=4)
    solved = nbformat.read(ROOT / "solutions" / name, as_version=4)
    answers = {cell.id: cell.source for cell in solved.cells}
    for student, keep in (("ada", range(99)), ("ben", range(4)), ("eve", ())):
        handed_in = nbformat.from_dict(released)
        exercises = [
            c for c in handed_in.cells if "exercise" in c.metadata.get("tags", ())
        ]
        for number, cell in enumerate(exercises):
            if number in keep:
                cell.source = answers[cell.id]
        if student == "eve":
            handed_in.cells.insert(2, new_code_cell(PATCHED))
        folder = course / "submitted" / student / "lab"
        folder.mkdir(parents=True)
        nbformat.write(handed_in, folder / name)
    nbgrader(course, "autograde", "lab")
    nbgrader(course, "generate_feedback", "lab")
    return course


def test_a_release_holds_what_the_lab_holds(course: Path) -> None:
    """Stubs, the text around them, broken programs: nothing is blanked."""
    name = f"{LAB}.ipynb"
    lab, released = (
        nbformat.read(path, as_version=4)
        for path in (ROOT / "labs" / name, course / "release" / "lab" / name)
    )
    assert [c.source for c in released.cells] == [c.source for c in lab.cells]


def test_a_class_of_three_gets_the_right_points(course: Path) -> None:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        found = {}
        for student in ("ada", "ben", "eve"):
            notebook = book.find_submission_notebook(LAB, "lab", student)
            assert not notebook.needs_manual_grade
            found[student] = (notebook.score, notebook.max_score)
        grades = book.find_submission_notebook(LAB, "lab", "ben").grades
        earned = {grade.name for grade in grades if grade.score}
    most = found["ada"][1]
    assert found["ada"] == (most, most) and most > 9
    assert earned == {"check-chains", "check-bounds", "check-reading", "check-ratios"}
    assert found["eve"] == (0, most)


def test_the_feedback_shows_the_verdict(course: Path) -> None:
    page = (course / "feedback" / "ben" / "lab" / f"{LAB}.html").read_text()
    assert "1.2 bounds: passed" in page and "1.6 is not solved yet" in page
