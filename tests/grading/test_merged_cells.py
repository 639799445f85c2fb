"""Cells that learners merge, copy and move: right answers keep their points."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlaplab.errors import NotebookError
from overlaplab.grading.cells import NotebookCell, find_lab
from overlaplab.grading.children import Judge
from overlaplab.grading.notebook import grade_notebook
from tests.grading.test_notebook import COUNTER
from tests.guards import GUARD_S

Cell = tuple[str, str, str]  # "solves", "checks" or "": what its metadata say; of which
IMPORT = "from overlaplab.grading import check\nfactor = 2"
DOUBLE = "def double(x):\n    return factor * x"
WRONG = "def double(x):\n    return 3 * x"
ANSWER = "answer, reason = 42, 'because'"
FIRST, SECOND, THIRD = (
    "check('98.1', double)",
    "check('98.2', Counter)",
    "check('98.3', answer, reason)",
)


def solves(number: int, source: str) -> Cell:
    return "solves", f"98.{number}", source


def checks(number: int, source: str) -> Cell:
    return "checks", f"98.{number}", source


def plain(source: str) -> Cell:
    return "", "", source


def node(role: str, exercise: str, source: str) -> dict[str, Any]:
    metadata = {
        "overlaplab": {"exercise": exercise},
        "nbgrader": {"grade": role == "checks"},
    }
    return {
        "cell_type": "code",
        "source": source,
        "outputs": [],
        "execution_count": None,
        "metadata": metadata if role else {},
    }


@pytest.fixture
def grade(judge: Judge, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """By exercise, why it did not pass."""

    def graded(*cells: Cell) -> dict[str, str]:
        nodes = [node(*cell) for cell in (plain(IMPORT), *cells)]
        path = tmp_path / "lab.ipynb"
        notebook = {"cells": nodes, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        path.write_text(json.dumps(notebook))
        report = grade_notebook(path, judge=judge, timeout_s=GUARD_S)
        return {r.exercise: r.reason for r in report.results if not r.passed}

    return graded


REST = (solves(2, COUNTER), checks(2, SECOND), solves(3, ANSWER), checks(3, THIRD))
RIGHT = {
    "a solution and its check, as the solution's cell": [
        solves(1, f"{DOUBLE}\n{FIRST}"),
        *REST,
    ],
    "a solution and its check, as the check's cell": [
        checks(1, f"{DOUBLE}\n{FIRST}"),
        *REST,
    ],
    "all solutions and checks in one cell": [
        solves(1, "\n".join([DOUBLE, FIRST, COUNTER, SECOND, ANSWER, THIRD]))
    ],
    "a cell that uses what the check's cell defines": [
        solves(1, "def double(x):\n    return twice * x"),
        checks(1, f"twice = 2\n{FIRST}"),
        *REST,
    ],
    "a comment that names another check": [
        solves(1, f"# first try check('98.2', Counter)\n{DOUBLE}"),
        checks(1, FIRST),
        *REST,
    ],
    "a comment that names its own check, and no cell says whose it is": [
        plain(f"# then: check('98.1', double)\n{DOUBLE}"),
        plain(f"{COUNTER}\n{ANSWER}"),
        plain("\n".join([FIRST, SECOND, THIRD])),
    ],
    "a copy of the check above the solution": [
        plain(FIRST),
        solves(1, DOUBLE),
        checks(1, FIRST),
        *REST,
    ],
    "a copy of the check at the end, where the name is another thing's": [
        solves(1, DOUBLE),
        checks(1, FIRST),
        *REST,
        plain("double = 7"),
        checks(1, FIRST),
    ],
    "a try that was wrong, in a copy of the cell above": [
        solves(1, WRONG),
        checks(1, FIRST),
        solves(1, DOUBLE),
        checks(1, FIRST),
        *REST,
    ],
    "a copy of the cell below its check, to play with": [
        solves(1, DOUBLE),
        checks(1, FIRST),
        *REST,
        solves(1, WRONG),
    ],
    "a solution in a cell of the learner's own": [
        solves(1, "def double(x):\n    raise NotImplementedError"),
        plain(DOUBLE),
        checks(1, FIRST),
        *REST,
    ],
    "a solution under another name, which the check is given": [
        solves(1, DOUBLE.replace("double", "twofold")),
        checks(1, "check('98.1', twofold)"),
        *REST,
    ],
    "another lab's check among its own": [
        solves(1, DOUBLE),
        checks(1, FIRST),
        plain("check('6.1', double)"),
        ("checks", "6.1", "check('6.1', double)"),
        *REST,
    ],
    "no check is left, and a name is used again further down": [
        solves(1, DOUBLE),
        plain("double = None"),
        solves(2, COUNTER),
        solves(3, ANSWER),
    ],
    "a check whose verdict is used": [
        solves(1, DOUBLE),
        checks(1, f"assert {FIRST}.passed\nfactor = 2"),
        *REST,
    ],
    "a check that is called from the package": [
        solves(1, f"import overlaplab as ol\n{DOUBLE}\nol.{FIRST}"),
        *REST,
    ],
}


@pytest.mark.parametrize("cells", RIGHT.values(), ids=RIGHT)
def test_right_answers_keep_their_points_however_their_cells_lie(grade, cells):
    assert grade(*cells) == {}


def test_the_last_of_several_checks_in_a_cell_counts(grade):
    both = "for double in (lambda x: 2 * x, lambda x: 3 * x):\n    " + FIRST
    reasons = grade(solves(1, both), *REST)
    assert "element 2 is 9" in reasons.pop("98.1") and not reasons


def test_what_a_cell_does_behind_its_check_does_not_mend_the_answer(grade):
    reasons = grade(solves(1, WRONG), checks(1, FIRST), plain(DOUBLE), *REST)
    assert "element 2 is 9" in reasons.pop("98.1") and not reasons


def test_a_cell_that_raises_is_blamed_before_the_checks_that_miss_its_name(grade):
    reasons = grade(solves(1, "1 / 0"), checks(1, FIRST), *REST)
    said = "the notebook defines no double; cell 2 raised ZeroDivisionError: division"
    assert reasons.pop("98.1") == f"{said} by zero" and not reasons


def test_cells_that_ask_whether_a_check_passed_run_as_if_it_had_not(grade):
    """Nothing was judged yet; and what the course keeps of a learner is its own."""
    ask = "from overlaplab.grading import solved\nif solved('98.1'):\n    Counter = int"
    cells = solves(1, DOUBLE), checks(1, FIRST), solves(2, f"{COUNTER}\n{ask}")
    assert grade(*cells, *REST[1:]) == {}


def test_a_lab_is_the_one_that_most_cells_name():
    cells = [NotebookCell(1, "", f"6.{n}") for n in (1, 2, 3)]
    assert find_lab([*cells, NotebookCell(4, "", "1.1")], Path("x")) == "06"
    with pytest.raises(NotebookError, match="as many exercises of one lab as of ano"):
        find_lab([cells[0], NotebookCell(4, "", "1.1")], Path("x"))


def test_a_lab_is_known_by_the_checks_it_calls_where_no_cell_says_so():
    cells = [NotebookCell(1, "# check('1.1', f)\ncheck('6.1', f)")]
    assert find_lab(cells, Path("x")) == "06"
