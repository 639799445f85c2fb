"""Grade a learner's notebook: read it, play its cells, judge its objects, report.

Children do the work, so that nothing in the notebook can touch a verdict: one plays
the cells and hands over the objects that exercises ask for (pickled by value), others
have never seen the notebook and judge them. What a cell prints, patches or redefines
stays in the first. All have deadlines; see `overlaplab.grading.children`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overlaplab.errors import NotebookError
from overlaplab.grading.cells import NotebookCell, find_lab, read_notebook
from overlaplab.grading.children import Judge, Order, Outcome
from overlaplab.grading.exercise import Exercise
from overlaplab.grading.verdict import Verdict

_AGAIN = (
    "Not judged is neither right nor wrong: grade this notebook again when fewer "
    "programs run on this machine."
)


@dataclass(frozen=True, slots=True)
class ExerciseResult:
    """One exercise of a graded notebook.

    Args:
        exercise, title: which.
        points, max_points: marks reached and reachable.
        optional: an extra, which the core does without.
        passed: whether every check of it passed.
        judged: False if time was over, or a process gone, through no fault of the
            learner's: no marks are given or taken.
        reason: why not, one line, "" if it passed.
        verdict: `Verdict.to_dict()`, None if there is none.
    """

    exercise: str
    title: str
    points: int
    max_points: int
    optional: bool
    passed: bool
    judged: bool
    reason: str
    verdict: Mapping[str, Any] | None

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}"

    @property
    def name(self) -> str:
        """Number and title, and whether it is an extra."""
        return f"{self.exercise} {self.title}" + (" (extra)" if self.optional else "")

    @property
    def outcome(self) -> str:
        """In two words."""
        if not self.judged:
            return "not judged"
        return "passed" if self.passed else "not yet"

    @property
    def says(self) -> str:
        """The verdict as the learner reads it, or why there is none."""
        if self.verdict is None:
            return f"{self.name}: {self.outcome}\n  {self.reason}"
        return str(Verdict.from_dict(self.verdict))


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
        """Of what was judged."""
        return sum(result.max_points for result in self.results if result.judged)

    @property
    def all_judged(self) -> bool:
        """Whether nothing was left open because of this machine."""
        return all(result.judged for result in self.results)

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
            points = r.points if r.judged else "-"
            rows.append((r.name, f"{points}/{r.max_points}", r.outcome, r.reason))
        last = "full marks" if self.full_marks else ""
        if self.core_passed and not self.full_marks:
            last = "core done"
        rows.append(("together", f"{self.points}/{self.max_points}", last, ""))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip()
            for a, b, c, d in rows
        ]
        if not self.all_judged:
            lines.append(_AGAIN)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "notebook": self.notebook,
            "lab": self.lab,
            "points": self.points,
            "max_points": self.max_points,
            "full_marks": self.full_marks,
            "core_passed": self.core_passed,
            "all_judged": self.all_judged,
            "exercises": [asdict(result) for result in self.results],
        }


def grade_notebook(
    path: str | Path,
    *,
    timeout_s: float = 3600.0,
    cell_timeout_s: float = 120.0,
    judge: Judge | None = None,
    progress: Callable[[str], None] = lambda what: None,
    done: Callable[[ExerciseResult], None] = lambda result: None,
) -> GradeReport:
    """Run a learner's notebook in child processes and judge each exercise of its lab.

    Every exercise is judged on its own: a cell that raises, hangs or kills its process
    costs what it should have defined, and nothing else.

    Args:
        path: the notebook; it is read, never written.
        timeout_s: deadline of the whole, on the wall.
        cell_timeout_s: deadline of one cell, in CPU time; on the wall, ten times that.
        judge: one that is running already, for many notebooks in a row, or for
            exercises of an instructor's own (`Judge(modules=["my_exercises"])`).
        progress: called with what is going on, "cell 7" or "exercise 6.3".
        done: called with each exercise's result as soon as it is there.

    Raises:
        NotebookError: it is not a notebook of a lab with exercises.
    """
    path = Path(path)
    cells = read_notebook(path)
    lab = find_lab(cells, path)
    results = []
    with contextlib.ExitStack() as stack:
        judge = judge or stack.enter_context(Judge())
        tasks = _tasks(judge, lab, path)
        stop_at = time.monotonic() + timeout_s
        directory = path.resolve().parent
        handover = judge.play(
            cells,
            _orders(cells, tasks),
            directory,
            stop_at=stop_at,
            cell_timeout_s=cell_timeout_s,
            progress=progress,
        )
        for task in tasks:
            progress(f"exercise {task.id}")
            outcome = handover.missing.get(task.id)
            if outcome is None:
                objects = handover.objects[task.id]
                outcome = judge.judge(task, objects, directory, stop_at)
            results.append(_result(task, outcome))
            done(results[-1])
    return GradeReport(str(path), lab, tuple(results))


def _tasks(judge: Judge, lab: str, path: Path) -> Sequence[Exercise]:
    tasks = judge.exercises(lab)
    if not tasks:
        known = ", ".join(sorted({task.lab for task in judge.exercises()})) or "none"
        raise NotebookError(
            f"{path}: exercises of lab {lab}, which is not installed; there are those "
            f"of {known}"
        )
    return tasks


def _result(task: Exercise, outcome: Outcome) -> ExerciseResult:
    verdict = outcome.verdict or {}
    passed = verdict.get("passed") is True and outcome.judged
    return ExerciseResult(
        exercise=task.id,
        title=task.title,
        points=task.points if passed else 0,
        max_points=task.points,
        optional=task.optional,
        passed=passed,
        judged=outcome.judged,
        reason="" if passed else outcome.reason or _first_reason(verdict),
        verdict=outcome.verdict,
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
    """Each exercise with the last cell in which it is solved, 0 where none says so."""
    own = {cell.exercise: cell.number for cell in cells if not cell.is_check}
    return [(task.id, task.solution, own.get(task.id, 0)) for task in tasks]
