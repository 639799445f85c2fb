"""Grade a learner's notebook: read it, play its cells, judge its objects, report.

Two children do the work, so that nothing in the notebook can touch a verdict: one
plays the cells and hands over the objects that exercises ask for (pickled by value),
the other has never seen the notebook and judges them. What a cell prints, patches or
redefines stays in the first. Both have deadlines; see `overlaplab.grading.children`.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlaplab.errors import NotebookError
from overlaplab.grading.children import (
    Handover,
    Judge,
    Order,
    Tell,
    play_cells,
    say_nothing,
)
from overlaplab.grading.exercise import Exercise, exercises

_CHECK_CALL = re.compile(r"\bcheck\(\s*[\"'](\d+\.\d+[a-z]?)[\"']")


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """One code cell.

    Args:
        number: position among all cells, from 1, as a person counts.
        source: its text.
        exercise: the exercise that it solves or checks, "" if none.
        is_check: it is an exercise's check; the grader judges in its place.
    """

    number: int
    source: str
    exercise: str = ""
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class ExerciseResult:
    """One exercise of a graded notebook.

    Args:
        exercise, title: which.
        points, max_points: marks reached and reachable.
        optional: an extra, which the core does without.
        passed: whether every check of it passed.
        reason: why not, one line, "" if it passed.
        verdict: `Verdict.to_dict()`, None if the exercise could not be judged.
    """

    exercise: str
    title: str
    points: int
    max_points: int
    optional: bool
    passed: bool
    reason: str
    verdict: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class GradeReport:
    """The marks of one notebook.

    Args:
        notebook: its path.
        lab: "06".
        results: one for each exercise of the lab, in order.
    """

    notebook: str
    lab: str
    results: tuple[ExerciseResult, ...]

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)

    @property
    def max_points(self) -> int:
        return sum(result.max_points for result in self.results)

    @property
    def full_marks(self) -> bool:
        """Every exercise passed, the extras too, and there is one."""
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def core_passed(self) -> bool:
        """Every exercise that is no extra passed, and there is one."""
        core = [result for result in self.results if not result.optional]
        return bool(core) and all(result.passed for result in core)

    def __str__(self) -> str:
        rows = [("exercise", "points", "", "")]
        for r in self.results:
            title = f"{r.exercise} {r.title}" + (" (extra)" if r.optional else "")
            outcome = "passed" if r.passed else "not yet"
            rows.append((title, f"{r.points}/{r.max_points}", outcome, r.reason))
        last = "full marks" if self.full_marks else ""
        if self.core_passed and not self.full_marks:
            last = "core done"
        rows.append(("together", f"{self.points}/{self.max_points}", last, ""))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip()
            for a, b, c, d in rows
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "notebook": self.notebook,
            "lab": self.lab,
            "points": self.points,
            "max_points": self.max_points,
            "full_marks": self.full_marks,
            "core_passed": self.core_passed,
            "exercises": [
                {
                    "exercise": r.exercise,
                    "title": r.title,
                    "points": r.points,
                    "max_points": r.max_points,
                    "optional": r.optional,
                    "passed": r.passed,
                    "reason": r.reason,
                    "verdict": r.verdict,
                }
                for r in self.results
            ],
        }


def grade_notebook(
    path: str | Path,
    *,
    timeout_s: float = 600.0,
    cell_timeout_s: float = 120.0,
    judge: Judge | None = None,
    tell: Tell = say_nothing,
) -> GradeReport:
    """Run a learner's notebook in child processes and judge each exercise of its lab.

    Every exercise is judged on its own: a cell that raises, hangs or kills its process
    costs what it should have defined, and nothing else.

    Args:
        path: the notebook; it is read, never written.
        timeout_s: deadline of the whole.
        cell_timeout_s: deadline of one cell.
        judge: one that is running already, for many notebooks in a row, or for
            exercises of an instructor's own (`Judge(modules=["my_exercises"])`).

        tell: is told what is going on, "cell 7" or "exercise 6.3".

    Raises:
        NotebookError: it is not a notebook of a lab with exercises.
    """
    if judge is None:
        with Judge() as judge:
            return grade_notebook(
                path,
                timeout_s=timeout_s,
                cell_timeout_s=cell_timeout_s,
                judge=judge,
                tell=tell,
            )
    path = Path(path)
    for module in judge.modules:
        importlib.import_module(module)
    cells = read_notebook(path)
    tasks = exercises(find_lab(cells, path))
    stop_at = time.monotonic() + timeout_s
    directory = path.resolve().parent
    handover = play_cells(
        [cell for cell in cells if not cell.is_check],
        _orders(cells, tasks),
        directory,
        stop_at=stop_at,
        cell_timeout_s=cell_timeout_s,
        tell=tell,
    )
    results = []
    for task in tasks:
        tell(f"exercise {task.id}")
        results.append(_grade_one(task, handover, judge, directory, stop_at))
    return GradeReport(str(path), tasks[0].lab, tuple(results))


def _grade_one(
    task: Exercise,
    handover: Handover,
    judge: Judge,
    directory: Path,
    stop_at: float,
) -> ExerciseResult:
    verdict: Mapping[str, Any] | None = None
    reason = handover.missing.get(task.id, "")
    if not reason:
        verdict, reason = judge.judge(
            task, handover.objects[task.id], directory, stop_at
        )
    passed = verdict is not None and verdict.get("passed") is True and not reason
    return ExerciseResult(
        exercise=task.id,
        title=task.title,
        points=task.points if passed else 0,
        max_points=task.points,
        optional=task.optional,
        passed=passed,
        reason="" if passed else reason or _first_reason(verdict or {}),
        verdict=verdict,
    )


def _first_reason(verdict: Mapping[str, Any]) -> str:
    """The first thing that was wrong, on one line."""
    if verdict.get("error"):
        return str(verdict["error"]).splitlines()[0]
    for check in verdict.get("checks", ()):
        if not check["passed"]:
            return str(check["seen"] or check["name"]).splitlines()[0]
    return "was not verified"


def _orders(cells: Sequence[NotebookCell], tasks: Sequence[Exercise]) -> list[Order]:
    """An exercise's objects are taken where its check stands, else at the end."""
    checks = {cell.exercise: cell.number for cell in cells if cell.is_check}
    return [Order(task.id, task.solution, checks.get(task.id)) for task in tasks]


def find_lab(cells: Sequence[NotebookCell], path: Path) -> str:
    """The lab whose exercises the cells name.

    Raises:
        NotebookError: they name none, or one that is not installed.
    """
    named = [cell.exercise for cell in cells if cell.exercise]
    if not named:
        raise NotebookError(
            f"{path}: no exercise in any of its {len(cells)} code cells; expected a "
            "notebook made from labs/, such as labs/06_bucketing.ipynb"
        )
    labs = {name.split(".")[0].zfill(2) for name in named}
    lab = labs.pop()
    if labs:
        raise NotebookError(
            f"{path}: exercises of labs {lab} and {', '.join(sorted(labs))}; expected "
            "those of one lab"
        )
    if not exercises(lab):
        known = ", ".join(sorted({task.lab for task in exercises()})) or "none"
        raise NotebookError(
            f"{path}: exercises of lab {lab}, which is not installed; there are those "
            f"of {known}"
        )
    return lab


def read_notebook(path: Path) -> list[NotebookCell]:
    """The code cells of a notebook.

    Raises:
        NotebookError: no such file, not JSON, or not a notebook of version 4.
    """
    if not path.exists():
        raise NotebookError(f"{path}: there is no such file; expected a notebook")
    if not path.is_file():
        raise NotebookError(f"{path}: is no file; expected a notebook (.ipynb)")
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise NotebookError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise NotebookError(
            f"{path}: is not a notebook: no JSON ({error}); save it in Jupyter again"
        ) from None
    cells = raw.get("cells") if isinstance(raw, dict) else None
    if not isinstance(cells, list) or raw.get("nbformat") != 4:
        raise NotebookError(
            f"{path}: is not a notebook of format 4: it has no list of cells with "
            '"nbformat": 4; save it in Jupyter again'
        )
    found = []
    for number, cell in enumerate(cells, start=1):
        if not isinstance(cell, dict) or "cell_type" not in cell:
            raise NotebookError(f"{path}, cell {number}: is no cell: {str(cell)[:40]}")
        if cell["cell_type"] == "code":
            found.append(_read_cell(cell, number, path))
    return found


def _read_cell(cell: Mapping[str, Any], number: int, path: Path) -> NotebookCell:
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(str(line) for line in source)
    if not isinstance(source, str):
        raise NotebookError(f"{path}, cell {number}: its source is no text")
    metadata = cell.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    ours, nbgrader = metadata.get("overlaplab"), metadata.get("nbgrader")
    exercise = ours.get("exercise", "") if isinstance(ours, dict) else ""
    locked = isinstance(nbgrader, dict) and nbgrader.get("grade") is True
    call = _CHECK_CALL.search(source)
    if call and not exercise:  # metadata lost on the way through another editor
        exercise, locked = call.group(1), True
    return NotebookCell(number, source, str(exercise), locked)
