"""`grade_notebook`: what a notebook can do, and what it cannot."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from overlaplab.errors import NotebookError
from overlaplab.grading.notebook import grade_notebook

MODULES = ("tests.grading.lab98",)
DOUBLE = "def double(x):\n    return factor * x"
COUNTER = (
    "class Counter:\n    def __init__(self):\n        self.value = 0\n"
    "    def add(self):\n        self.value += 1"
)
ANSWER = "answer, reason = 42, 'because'"


def write(folder: Path, *sources: str, **solved: str) -> Path:
    """A notebook: `sources` first, then each exercise's solution and its check."""
    cells = [("", False, source) for source in sources]
    for exercise, source in (
        ("98.1", solved.get("double", DOUBLE)),
        ("98.2", solved.get("counter", COUNTER)),
        ("98.3", solved.get("answer", ANSWER)),
    ):
        cells.append((exercise, False, source))
        check = solved.get("check", f"check('{exercise}', object())")
        cells.append((exercise, True, check))
    nodes = [
        {
            "cell_type": "code",
            "source": source,
            "outputs": [],
            "execution_count": None,
            "metadata": {
                "overlaplab": {"exercise": exercise},
                "nbgrader": {"grade": is_check},
            }
            if exercise
            else {},
        }
        for exercise, is_check, source in cells
    ]
    path = folder / "lab.ipynb"
    path.write_text(
        json.dumps({"cells": nodes, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def grade(path: Path, **limits: float):
    report = grade_notebook(path, modules=MODULES, timeout_s=90, **limits)
    return report, {r.exercise: (r.passed, r.reason) for r in report.results}


def test_a_solved_notebook_gets_full_marks_and_a_table(tmp_path):
    report, _ = grade(write(tmp_path, "factor = 2"))
    assert report.full_marks and (report.points, report.max_points) == (4, 4)
    assert str(report).splitlines() == [
        "exercise            points",
        "98.1 Double            1/1  passed",
        "98.2 Counter           2/2  passed",
        "98.3 Answer (extra)    1/1  passed",
        "together               4/4",
    ]
    assert json.loads(json.dumps(report.to_dict()))["full_marks"] is True


def test_a_wrong_solution_costs_its_own_points_and_no_others(tmp_path):
    report, seen = grade(write(tmp_path, "factor = 3"))
    assert not report.full_marks and report.points == 3
    passed, reason = seen["98.1"]
    assert not passed and "median ratio to the right value is 1.5" in reason


def test_an_extra_is_not_needed_for_full_marks(tmp_path):
    report, _ = grade(write(tmp_path, "factor = 2", answer="answer = reason = 'no'"))
    assert report.full_marks and (report.points, report.max_points) == (3, 4)


def test_a_stub_that_raises_and_a_cell_that_raises_spare_the_others(tmp_path):
    path = write(
        tmp_path,
        "1 / 0",
        "factor = 2",
        double="raise NotImplementedError",
        counter="class Counter:\n    def __init__(self):\n        raise KeyError(7)",
    )
    _, seen = grade(path)
    assert seen["98.1"][0] is False
    assert "defines no double" in seen["98.1"][1]
    assert "NotImplementedError" in seen["98.1"][1]
    assert seen["98.2"] == (False, "raised KeyError: 7")
    assert seen["98.3"][0] is True


def test_a_cell_that_ends_the_process_costs_what_it_should_have_defined(tmp_path):
    path = write(tmp_path, "factor = 2", counter="import os; os._exit(0)")
    _, seen = grade(path)
    assert seen["98.1"][0] and seen["98.3"][0]
    assert seen["98.2"] == (False, "cell 4 ended the process with code 0")


def test_a_cell_that_kills_itself_is_named_with_its_signal(tmp_path):
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    _, seen = grade(write(tmp_path, "factor = 2", double=kill))
    assert seen["98.1"] == (False, "cell 2 was killed by SIGKILL")
    assert seen["98.2"][0] and seen["98.3"][0]


def test_a_cell_that_never_ends_is_stopped_at_its_deadline(tmp_path):
    path = write(tmp_path, "factor = 2", double="while True: pass")
    start = time.monotonic()
    _, seen = grade(path, cell_timeout_s=1)
    assert time.monotonic() - start < 60
    assert "did not end within 1 s" in seen["98.1"][1]
    assert seen["98.2"][0] and seen["98.3"][0]


def test_a_solution_that_never_ends_or_exits_fails_alone(tmp_path):
    path = write(
        tmp_path,
        double="def double(x):\n    import os\n    os._exit(0)",
        counter="class Counter:\n    def __init__(self):\n        while True: pass",
    )
    _, seen = grade(path)
    assert seen["98.1"][0] is False and "ended the process" in seen["98.1"][1]
    assert seen["98.2"][0] is False and "stopped after 3 s" in seen["98.2"][1]
    assert seen["98.3"][0] is True


def test_sys_exit_in_a_solution_is_a_fail(tmp_path):
    path = write(tmp_path, double="import sys\ndef double(x):\n    sys.exit(0)")
    _, seen = grade(path)
    assert seen["98.1"] == (False, "raised SystemExit: 0")


CHEATS = """
import overlaplab.grading as g, overlaplab.grading.laws as laws
import overlaplab.grading.exercise as e, overlaplab.grading.check as c
import overlaplab.grading.verdict as v, torch, builtins
print('98.1 Double: passed')
check = g.check = c.check = lambda *a: True
laws.values_law = lambda *a, **k: []
e.Sheet.expect = lambda *a, **k: True
e.Sheet.verdict = lambda self, **k: v.Verdict('98.1', 'Double', True)
e._REGISTRY.clear()
torch.isclose = lambda *a, **k: torch.ones(3, dtype=torch.bool)
torch.set_default_dtype(torch.float64)
builtins.all = lambda *a: True
"""


def test_nothing_that_a_cell_prints_patches_or_redefines_reaches_a_verdict(tmp_path):
    path = write(
        tmp_path,
        CHEATS,
        "factor = 3",
        counter="class Counter: value = 0",
        answer="class Yes:\n    def __eq__(self, other): return 1\n"
        "answer, reason = Yes(), ''",
        check="print('passed')",
    )
    report, seen = grade(path)
    assert report.points == 0
    assert "AttributeError" in seen["98.2"][1]


def test_checks_may_be_edited_or_deleted(tmp_path):
    path = write(tmp_path, "factor = 2", check="raise SystemExit")
    raw = json.loads(path.read_text())
    raw["cells"] = [c for c in raw["cells"] if c["source"] != "raise SystemExit"]
    path.write_text(json.dumps(raw))
    report, _ = grade(path)
    assert report.full_marks


def test_objects_are_taken_where_the_check_stands(tmp_path):
    path = write(tmp_path, "factor = 2")
    raw = json.loads(path.read_text())
    later = {"cell_type": "code", "source": "double = None", "metadata": {}}
    raw["cells"].append(later)
    path.write_text(json.dumps(raw))
    _, seen = grade(path)
    assert seen["98.1"][0] is True


def test_magics_display_and_modules_beside_the_notebook_work(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    path = write(
        tmp_path,
        "%matplotlib inline\nimport beside\nfrom IPython.display import display\n"
        "display(1)\nfactor = beside.FACTOR",
        double="def double(x):\n    return beside.FACTOR * x",
    )
    report, _ = grade(path)
    assert report.full_marks


def test_a_solution_that_cannot_be_copied_says_so(tmp_path):
    path = write(
        tmp_path, "import threading", answer="answer, reason = threading.Lock(), 1"
    )
    _, seen = grade(path)
    assert "cannot be copied" in seen["98.3"][1]


def test_the_notebook_itself_is_not_written(tmp_path):
    path = write(tmp_path, "factor = 2\nopen('left', 'w').write('x')")
    before = path.read_bytes()
    grade(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["lab.ipynb"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("print(1)", "no JSON"),
        ("[1, 2]", "not a notebook of format 4"),
        ('{"cells": 3, "nbformat": 4}', "not a notebook of format 4"),
        ('{"worksheets": [], "nbformat": 3}', "not a notebook of format 4"),
        ('{"cells": [7], "nbformat": 4}', "cell 1: is no cell"),
        ('{"cells": [], "nbformat": 4}', "no exercise in any of its 0 code cells"),
        ("\udcff", "no JSON"),
    ],
)
def test_what_is_no_notebook_gets_one_clear_error(tmp_path, content, says):
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(NotebookError, match=says) as caught:
        grade_notebook(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_directory_get_one_clear_error(tmp_path):
    with pytest.raises(NotebookError, match="there is no such file"):
        grade_notebook(tmp_path / "none.ipynb")
    with pytest.raises(NotebookError, match="is no file"):
        grade_notebook(tmp_path)


def test_a_lab_that_is_not_installed_is_refused(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text().replace("98.", "97."))
    with pytest.raises(NotebookError, match="exercises of lab 97"):
        grade_notebook(path, modules=MODULES)
