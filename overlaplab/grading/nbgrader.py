"""For nbgrader: what a check cell earns is decided by the judge.

nbgrader runs a notebook in one kernel and reads the marks off what its check cells
show. So who redefines `check` has full marks there. `judge_checks` stands in the place
of that run: it has the notebook judged as `overlaplab grade` does, and writes each
verdict under its check. nbgrader's own steps go on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlaplab.errors import NotebookError
from overlaplab.grading.cells import checks_in
from overlaplab.grading.children import Judge
from overlaplab.grading.notebook import ExerciseResult, grade_notebook

PREPROCESSORS = (
    "overlaplab.grading.nbgrader.judge_checks",  # nbgrader's own: Execute
    "nbgrader.preprocessors.IgnorePattern",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
)


def configure(config: Any) -> None:
    """Set nbgrader up for labs; two lines of nbgrader_config.py call it.

        from overlaplab.grading.nbgrader import configure
        configure(get_config())

    Labs are released as they stand in labs/: `ClearSolutions` would blank each cell
    that is to be filled in, the text around the gap and broken programs included.
    """
    config.ClearSolutions.enabled = False
    config.Autograde.autograde_preprocessors = list(PREPROCESSORS)


def judge_checks(
    notebook: Any, resources: Mapping[str, Any], *, judge: Judge | None = None
) -> tuple[Any, Mapping[str, Any]]:
    """A preprocessor of `nbgrader autograde`: write each verdict under its check.

    A check is known by its text, which nbgrader has restored by then. The notebook's
    other cells are run by the judge and show nothing.

    Args:
        notebook: as nbformat reads it; outputs of its checks are replaced.
        resources: nbconvert's; they say where its file is, which is what is judged.
        judge: see `grade_notebook`.

    Raises:
        NotebookError: it is no lab's; an exercise could not be judged, so that it is
            neither right nor wrong; or a cell is marked that nobody has run.
    """
    place = resources["metadata"]
    path = Path(place["path"]) / f"{place['name']}.ipynb"
    checks = []
    for cell in filter(_is_marked, notebook.cells):
        if found := checks_in(cell.source):
            checks.append((cell, found))
        elif cell.execution_count is None:
            raise NotebookError(
                f"{path}: cell {cell.metadata.nbgrader.grade_id!r} is marked, is no "
                "check of a lab, and has not been run: it would get all its points. "
                "In nbgrader_config.py, after configure(), run all cells first: "
                "c.Autograde.autograde_preprocessors.insert(0, "
                "'nbgrader.preprocessors.Execute')"
            )
    if not checks:
        return notebook, resources
    report = grade_notebook(path, judge=judge)
    if open_ones := [r.exercise for r in report.results if not r.judged]:
        raise NotebookError(
            f"{path}: {', '.join(open_ones)} could not be judged on this busy machine; "
            "run nbgrader autograde again for this notebook"
        )
    results = {result.exercise: result for result in report.results}
    for cell, found in checks:
        cell.outputs = [
            output for name in found for output in _shown(name, results.get(name))
        ]
    return notebook, resources


def _is_marked(cell: Any) -> bool:
    """Whether nbgrader takes the cell's mark from its outputs."""
    ours = cell.metadata.get("nbgrader", {})
    by_outputs = ours.get("grade") and not ours.get("solution")
    return cell.cell_type == "code" and bool(by_outputs)


def _shown(name: str, result: ExerciseResult | None) -> list[Any]:
    """What the check of an exercise shows: the verdict, and an error if it failed."""
    from nbformat.v4 import new_output

    said = f"{name}: this notebook is another lab's" if result is None else result.says
    outputs = [new_output("stream", name="stdout", text=f"{said}\n")]
    if result is None or not result.passed:
        what = f"{name} is not solved yet"
        traceback = [f"CheckFailed: {what}"]
        outputs.append(
            new_output("error", ename="CheckFailed", evalue=what, traceback=traceback)
        )
    return outputs
