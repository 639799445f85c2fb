"""The proof that a lab as handed out fails at its checks and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

import notebook_runs as runs
from lesson_cells import read_lesson
from overlaplab.grading import find_exercise


def cell(name: str, *, raises: str = "", tags: tuple[str, ...] = ()) -> NotebookNode:
    """An executed cell, which raised an exception of that name if one is given."""
    outputs = []
    if raises:
        outputs = [new_output("error", ename=raises, evalue="why", traceback=[])]
    return new_code_cell("", id=name, metadata={"tags": tags}, outputs=outputs)


def predicted(says: str) -> NotebookNode:
    """An executed cell that prints a prediction beside the outcome."""
    printed = new_output("stream", name="stdout", text=f"in ms:  {says}; actual: 5\n")
    return new_code_cell("", id="seen", outputs=[printed])


CHECK = cell("check-1", raises="AssertionError", tags=("check",))


@pytest.mark.parametrize(
    ("cells", "problems"),
    [
        ([cell("given"), CHECK], []),
        (
            [cell("shown", raises="KeyError", tags=("raises-exception",)), CHECK],
            [],
        ),
        (
            [cell("given", raises="KeyError"), CHECK],
            ["cell 'given': raises, and is no check: KeyError: why"],
        ),
        (
            [cell("check-0", tags=("check",)), CHECK],
            ["cell 'check-0': this check passes on the bare stub"],
        ),
        (
            [cell("check-1", raises="NameError", tags=("check",))],
            ["cell 'check-1': raises for the wrong reason, NameError: why"],
        ),
        ([predicted("no guess"), CHECK], []),
        (
            [predicted("your guess: []"), CHECK],
            ["cell 'seen': shows a guess that nobody made"],
        ),
        ([cell("given")], ["no cell: no check"]),
        ([], ["no cell: no check"]),
    ],
    ids=[
        "good",
        "shown",
        "elsewhere",
        "passes",
        "no verdict",
        "no guess",
        "guess",
        "no check",
        "empty",
    ],
)
def test_only_checks_raise_and_each_of_them_does(
    cells: list[NotebookNode], problems: list[str]
) -> None:
    assert runs.unsolved_problems(new_notebook(cells=cells)) == problems


def test_a_lab_whose_check_passes_is_refused_with_its_name(tmp_path: Path) -> None:
    cells = [
        new_code_cell("x = 1", id="given"),
        new_code_cell("assert x", id="check-1", metadata={"tags": ["check"]}),
    ]
    runs.write(new_notebook(cells=cells), tmp_path / "06_x.ipynb")

    with pytest.raises(runs.BuildError, match=r"06_x\.ipynb, cell 'check-1': this"):
        runs.prove_unsolved(tmp_path)


def test_no_lab_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(runs.BuildError, match="nothing to prove"):
        runs.prove_unsolved(tmp_path)


def test_only_the_named_labs_are_run(tmp_path: Path) -> None:
    raising = new_code_cell(
        "raise AssertionError", id="c", metadata={"tags": ["check"]}
    )
    passing = new_code_cell("assert 1", id="c", metadata={"tags": ["check"]})
    runs.write(new_notebook(cells=[raising]), tmp_path / "03_x.ipynb")
    runs.write(new_notebook(cells=[passing]), tmp_path / "06_x.ipynb")

    runs.prove_unsolved(tmp_path, ["03"])
    with pytest.raises(runs.BuildError, match="no lab that starts with 09"):
        runs.prove_unsolved(tmp_path, ["09"])


LESSONS = sorted((Path(__file__).parents[2] / "course").glob("[0-9]*.py"))
# Cells below a check that show what its exercise asks for, and so ask `solved` first.
SHOW_ANSWERS = {
    "00_start": {"backward-seen": "0.2"},
    "01_overlap_arithmetic": {
        "beside-runs": "1.5",
        "share-table": "1.7",
        "settings-seen": "1.8",
    },
    "02_measuring": {"reading-seen": "2.5", "bill-seen": "2.7"},
    "03_streams": {"waits-compared": "3.2", "enough-seen": "3.5"},
    "04_async_collectives": {"luck": "4.8a", "choose-table": "4.9"},
    "06_bucketing": {"fit-profile": "6.0", "three-shares": "6.4b", "tail": "6.4b"},
    "13_compiler_insertion": {"lists-again": "13.1"},
    "16_checkpointing": {"peak-seen": "16.1"},
}
ACTS = "what it does is run, and drawn or timed"
# The course's own runs in the place of what is not solved: why that is no answer.
OURS_MAY_RUN = {
    "1.4": "its numbers stand in the text above, or are of other runs",
    "2.3": "the package's own report stands beside it",
    "2.6": "other traces than the exercise's, and only how many gaps there are",
    "5.1": "the windows of the run stand beside it",
    "16.3": "only how much longer the rules take, and what a run takes",
    "16.5": "the outcome of the prediction above it",
    "16.7": "only which plan is the shorter",
} | dict.fromkeys(
    (
        *("0.4", "2.1", "3.1", "3.4", "4.3", "4.4", "5.3", "5.4a", "5.4", "6.1"),
        *("6.2", "6.3", "8.1", "8.2", "8.3", "10.2", "10.3", "10.5", "13.2"),
        *("13.3", "13.4", "16.2", "16.4"),
    ),
    ACTS,
)


def test_what_stands_behind_the_stop_line_is_an_extra_and_nothing_before_it() -> None:
    """Who has done the core of a lab is told so by `overlaplab grade`."""
    wrong = []
    for lesson in LESSONS:
        behind = False
        for cell in read_lesson(lesson):
            behind = behind or "close the laptop here" in cell.source
            if cell.kind == "check" and find_exercise(cell.exercise).optional != behind:
                wrong.append(cell.exercise)
    assert wrong == []


def test_what_shows_an_answer_asks_first_whether_it_was_found() -> None:
    """Each of these cells was seen below an unsolved exercise with its answer."""
    asked: dict[str, dict[str, str]] = {}
    for lesson in LESSONS:
        for cell in read_lesson(lesson):
            for exercise in re.findall(r'^if solved\("(.*)"\):$', cell.source, re.M):
                asked.setdefault(lesson.stem, {})[cell.id] = exercise
    assert asked == SHOW_ANSWERS


def test_where_the_courses_own_runs_somebody_has_said_why_it_is_no_answer() -> None:
    """A cell that asks `solved` runs the learner's, and needs no reason."""
    run = {
        exercise
        for lesson in LESSONS
        for cell in read_lesson(lesson)
        for exercise in re.findall(r"\.(?:mine_or_)?ours\(.([\d.]+\w?).\)", cell.source)
        if f'if solved("{exercise}"):' not in cell.source
    }
    assert run == set(OURS_MAY_RUN)


def test_a_figure_that_hangs_on_an_if_is_displayed() -> None:
    """A notebook shows the value of a cell's last line, but of none within an `if`."""
    lost = [
        f"{cell.where}: {ast.unparse(line)[:60]}"
        for lesson in LESSONS
        for cell in read_lesson(lesson)
        if cell.type == "code"
        for outer in ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.M)).body
        if isinstance(outer, ast.If)
        for line in ast.walk(outer)
        if isinstance(line, ast.Expr) and ast.unparse(line).startswith("view.")
    ]
    assert lost == []
