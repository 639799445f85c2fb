"""A lab of an instructor's own, outside the repository, as the docstring shows it."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import overlaplab.grading
from overlaplab import ours
from overlaplab.errors import NotebookError
from overlaplab.grading import exercises
from overlaplab.grading.children import Judge
from overlaplab.grading.exercise import _REGISTRY
from overlaplab.grading.notebook import grade_notebook
from tests.guards import GUARD_S

RIGHT = """\
def make_reducer(model):
    return ol.BucketedReducer(model, bucket_mib=0.05)
"""
WRONG = """\
class Sum:
    def __init__(self, model):
        self.model = ol.SerialReducer(model)
    def wait(self):
        pass
make_reducer = Sum
"""


def documented(start: str, end: str) -> str:
    """The indented code of the docstring from one line to before another."""
    text = overlaplab.grading.__doc__ or ""
    return textwrap.dedent(text[text.index(start) : text.index(end)])


def install(folder: Path, package: str, labs: str, checks: str) -> None:
    """What pip leaves: a package and its entry points."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / package / "checks.py").write_text(checks)
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    )
    (about / "entry_points.txt").write_text(f"[{ours.LABS}]\n{labs}\n")


def write(path: Path, *sources: str) -> Path:
    empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": 1}
    cells = [{**empty, "source": source} for source in sources]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))
    return path


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    folder = tmp_path_factory.mktemp("site")
    graders = documented("    from overlaplab.grading import Sheet", "What is text")
    install(folder, "my_course", "lab90 = my_course.checks", graders)
    install(folder, "broken_course", "lab91 = broken_course.checks", "import no_such")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with Judge() as running:
            yield running


@pytest.mark.parametrize(("solution", "points"), [(RIGHT, 3), (WRONG, 0)])
def test_the_documented_exercise_of_an_installed_package_marks_a_notebook(
    judge: Judge, tmp_path: Path, solution: str, points: int
) -> None:
    check = documented("    from overlaplab.grading import check", "`overlaplab grade")
    path = write(tmp_path / "own.ipynb", "import overlaplab as ol", solution, check)
    report = grade_notebook(path, judge=judge, timeout_s=GUARD_S)
    assert (report.lab, report.points, report.max_points) == ("90", points, 3)


def test_graders_that_cannot_be_imported_are_named(judge: Judge) -> None:
    with pytest.raises(NotebookError) as caught:
        judge.exercises("91")
    assert str(caught.value) == (
        "exercises cannot be loaded: ModuleNotFoundError: No module named 'no_such' "
        "(in broken_course.checks, the graders of lab91)"
    )


def test_an_entry_point_of_any_name_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "graders_of_89.py").write_text(
        "from overlaplab.grading import exercise\n"
        "@exercise('89.1', title='One', solution='one', verifies=('it is so',))\n"
        "def grade(sheet, one): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = EntryPoint("mine", "graders_of_89", ours.LABS)
    monkeypatch.setattr(ours, "lab_entry_points", lambda: (mine,))
    try:
        assert [e.id for e in exercises("89")] == ["89.1"]
    finally:
        _REGISTRY.pop("89.1", None)
