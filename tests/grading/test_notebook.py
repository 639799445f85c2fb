"""`grade_notebook`: what a notebook can do, and what it cannot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlaplab.errors import NotebookError
from overlaplab.grading import channel, forks
from overlaplab.grading.children import Judge
from overlaplab.grading.notebook import GradeReport, grade_notebook
from tests.guards import GUARD_S, wait_until

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


Seen = dict[str, tuple[bool, str]]


@pytest.fixture
def grade(judge: Judge) -> Callable[..., tuple[GradeReport, Seen]]:
    return lambda path, **limits: _grade(path, judge, **limits)


def _grade(path: Path, judge: Judge, **more: Any) -> tuple[GradeReport, Seen]:
    report = grade_notebook(path, judge=judge, timeout_s=GUARD_S, **more)
    return report, {r.exercise: (r.passed, r.reason) for r in report.results}


def test_a_solved_notebook_gets_full_marks_and_is_left_as_it_was(tmp_path, grade):
    """With magics, display(), a module beside it, a file it writes, no checks left."""
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    path = write(
        tmp_path,
        "%matplotlib inline\nimport beside\nfrom IPython.display import display\n"
        "display(1)\nopen('left', 'w').write('x')",
        double="def double(x):\n    return beside.FACTOR * x",
        check="# deleted",
    )
    raw = json.loads(path.read_text())
    raw["cells"] = [c for c in raw["cells"] if c["source"] != "# deleted"]
    path.write_text(json.dumps(raw))
    before = path.read_bytes()
    seen: list[str] = []
    report, _ = grade(path, progress=seen.append, done=lambda r: seen.append(str(r)))
    assert seen[0] == "cell 1"
    assert seen[-2:] == ["exercise 98.3", "98.3 Answer (extra): passed"]
    assert str(report).splitlines() == [
        "exercise             points",
        "98.1 Double             1/1  passed",
        "98.2 Counter            2/2  passed",
        "98.3 Answer (extra)     1/1  passed",
        "together                4/4  full marks",
    ]
    assert report.full_marks
    assert json.loads(json.dumps(report.to_dict()))["full_marks"] is True
    assert path.read_bytes() == before
    assert not (tmp_path / "left").exists()


def test_a_wrong_solution_costs_its_own_points_and_no_others(tmp_path, grade):
    report, seen = grade(write(tmp_path, "factor = 3"))
    assert not report.full_marks and report.points == 3
    passed, reason = seen["98.1"]
    assert not passed and "median ratio to the right value is 1.5" in reason


def test_the_core_is_done_without_extras_and_objects_taken_at_their_check(
    tmp_path, grade
):
    path = write(tmp_path, "factor = 2", answer="answer = reason = 'no'")
    raw = json.loads(path.read_text())
    later = {"cell_type": "code", "source": "double = None", "metadata": {}}
    raw["cells"].append(later)
    path.write_text(json.dumps(raw))
    report, _ = grade(path)
    assert report.core_passed and not report.full_marks
    assert str(report).splitlines()[-1].split() == ["together", "3/4", "core", "done"]


def test_cells_that_raise_cost_what_they_should_have_defined(tmp_path, grade):
    path = write(
        tmp_path,
        "1 / 0",
        "import threading",
        double="raise NotImplementedError",
        counter="class Counter:\n    def __init__(self):\n        raise KeyError(7)",
        answer="answer, reason = threading.Lock(), 1",
    )
    report, seen = grade(path)
    assert "defines no double" in seen["98.1"][1]
    assert "cell 3 raised NotImplementedError" in seen["98.1"][1]
    assert seen["98.2"] == (False, "your code raised KeyError: 7")
    assert "in __init__, line 3: raise KeyError(7)" in report.results[1].says
    assert "answer, reason cannot be copied" in seen["98.3"][1]


QUIET = "os._exit, or a library that gave up"


def test_cells_that_end_their_process_are_named_and_others_graded(tmp_path, grade):
    path = write(
        tmp_path,
        double="import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        counter="import os; os._exit(0)",
    )
    _, seen = grade(path)
    assert seen == {
        "98.1": (False, "cell 1 was killed by SIGKILL (out of memory?)"),
        "98.2": (False, f"cell 3 ended the process with code 0 ({QUIET})"),
        "98.3": (True, ""),
    }


def test_a_cell_that_never_ends_is_stopped_at_its_deadline(tmp_path, grade):
    path = write(tmp_path, double="while True: pass")
    _, seen = grade(path, cell_timeout_s=1)
    assert "did not end within 1 s" in seen["98.1"][1]
    assert seen["98.2"][0] and seen["98.3"][0]


def test_solutions_that_never_end_or_exit_fail_alone(tmp_path, grade):
    path = write(
        tmp_path,
        double="def double(x):\n    import os\n    os._exit(0)",
        counter="class Counter:\n    def __init__(self):\n        while True: pass",
        answer="class Exit:\n    def __eq__(self, other):\n"
        "        raise SystemExit(0)\nanswer = reason = Exit()",
    )
    _, seen = grade(path)
    assert seen["98.1"][0] is False and "ended the process" in seen["98.1"][1]
    assert seen["98.2"][0] is False and "stopped after 3 s" in seen["98.2"][1]
    assert seen["98.3"] == (False, "the answer is right")  # its __eq__ is not asked


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        ("raise ValueError('\\ud800')", "raised ValueError: \\ud800"),
        ("raise type('E', (Exception,), {'__str__': 1})", "raised E: (its message can"),
    ],
)
def test_an_error_that_cannot_be_printed_is_still_the_codes(
    tmp_path, grade, raises, says
):
    counter = f"class Counter:\n    def __init__(self):\n        {raises}"
    path = write(tmp_path, "factor = 2", raises, counter=counter, double="double = 1/0")
    _, seen = grade(path)
    assert says in seen["98.2"][1] and seen["98.3"] == (True, "")
    assert "raised ZeroDivisionError" in seen["98.1"][1]


ORPHAN = """
import os, time
def start(path):
    if os.fork() == 0:
        os.setsid()
        open(path, "w").write(str(os.getpid()))
        time.sleep(1000)
    while not os.path.exists(path) or not open(path).read():
        pass
"""


def test_a_process_in_a_session_of_its_own_is_not_left_behind(tmp_path, grade):
    """One of a cell, and one of a check that ends its process."""
    cell, checked = tmp_path / "cell", tmp_path / "checked"
    path = write(
        tmp_path,
        f"factor = 2{ORPHAN}start({str(cell)!r})",
        double=f"def double(x):\n    start({str(checked)!r})\n    os._exit(3)",
    )
    _, seen = grade(path)
    assert "with code 3" in seen["98.1"][1] and seen["98.3"] == (True, "")
    for written in (cell, checked):
        with pytest.raises(ProcessLookupError):
            os.kill(int(written.read_text()), 0)


def test_a_server_that_always_dies_judges_nothing_and_loses_nothing(
    tmp_path, judge, monkeypatch
):
    """Killed before each fork: also the one that was started in its place."""
    dies = forks.Fork.__init__

    def killed_before(self, server, job):
        if job == "host":
            server.process.kill()
            server.process.wait()
        dies(self, server, job)

    monkeypatch.setattr(forks.Fork, "__init__", killed_before)
    report, seen = _grade(write(tmp_path, "factor = 2"), judge)
    assert not any(result.judged or result.points for result in report.results)
    assert "the judging process is gone" in seen["98.1"][1]
    monkeypatch.undo()
    assert _grade(write(tmp_path, "factor = 2"), judge)[0].full_marks


def test_a_module_that_cannot_be_imported_is_one_clear_error(tmp_path):
    modules = ["tests.grading.no_such_module"]
    with Judge(modules) as broken, pytest.raises(NotebookError, match="nothing can"):
        grade_notebook(write(tmp_path), judge=broken)


KILLED_BY_SOMEBODY = """
import os, signal
def killed(path, times):
    open(path, "a").write("x")
    if len(open(path).read()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_somebody_killed_is_tried_once_more_and_never_zero_points(tmp_path, grade):
    """Out of memory, say: once in a cell and in two checks, in one of them twice."""
    cell, once, twice = (str(tmp_path / name) for name in ("cell", "once", "twice"))
    path = write(
        tmp_path,
        f"{KILLED_BY_SOMEBODY}\nkilled({cell!r}, 1)",
        double=f"def double(x):\n    killed({once!r}, 1)\n    return 2 * x",
        counter=f"class Counter:\n    def __init__(_):\n        killed({twice!r}, 9)",
    )
    report, seen = grade(path)
    assert seen["98.1"] == seen["98.3"] == (True, "")
    assert [len(Path(p).read_text()) for p in (cell, once, twice)] == [2, 2, 2]
    counter = report.results[1]
    assert not counter.judged and not counter.passed
    assert (report.points, report.max_points) == (2, 2)
    assert not report.all_judged and not report.full_marks and not report.core_passed
    assert report.to_dict()["all_judged"] is False
    lines = str(report).splitlines()
    assert lines[2].startswith("98.2 Counter            -/2  not judged  the code was")
    assert lines[-1].startswith("Not judged is neither right nor wrong: grade this")


def test_what_the_deadline_of_the_notebook_left_open_is_not_judged(tmp_path, grade):
    path = write(tmp_path, "factor = 2", double="import time; time.sleep(1000)")
    with Judge(MODULES) as slow_to_start:
        report = grade_notebook(path, judge=slow_to_start, timeout_s=4)
    assert not any(result.judged or result.points for result in report.results)
    assert "deadline of the notebook" in report.results[0].reason


CHEATS = """
import overlaplab.grading as g, overlaplab.grading.laws as laws
import overlaplab.grading.exercise as e, overlaplab.grading.judging as c
import overlaplab.grading.verdict as v, torch, builtins, sys
print('98.1 Double: passed')
check = g.check = sys.modules['overlaplab.grading.judging'].check = lambda *a: True
laws.values_law = lambda *a, **k: []
sheet = sys.modules['overlaplab.grading.exercise'].Sheet
sheet.expect = lambda *a, **k: True
sheet.verdict = lambda self, **k: v.Verdict('98.1', 'Double', True)
torch.isclose = lambda *a, **k: torch.ones(3, dtype=torch.bool)
torch.set_default_dtype(torch.float64)
builtins.all = lambda *a: True
"""


def test_nothing_that_a_cell_prints_or_patches_reaches_a_verdict(tmp_path, grade):
    path = write(
        tmp_path,
        CHEATS,
        "factor = 3",
        counter="class Counter: value = 0",
        answer="class Yes:\n    def __eq__(self, other): return 1\n"
        "answer = reason = Yes()",
        check="print('passed')",
    )
    report, seen = grade(path)
    assert report.points == 0
    assert "AttributeError" in seen["98.2"][1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("print(1)", "no JSON"),
        ('{"nbformat": ' + "4" * 5000 + "}", "no JSON"),
        ("[1, 2]", "not a notebook of format 4"),
        ('{"cells": 3, "nbformat": 4}', "not a notebook of format 4"),
        ('{"worksheets": [], "nbformat": 3}', "not a notebook of format 4"),
        ('{"cells": [7], "nbformat": 4}', "cell 1: is no cell"),
        ('{"cells": [], "nbformat": 4}', "no exercise in any of its 0 code cells"),
        ("\udcff", "no JSON"),
        ("\ufeff" + '{"cells": [], "nbformat": 4}', "no exercise in any of its 0"),
    ],
)
def test_what_is_no_notebook_gets_one_clear_error(tmp_path, content, says):
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(NotebookError, match=says) as caught:
        grade_notebook(path)
    assert str(path) in str(caught.value)


def test_half_a_surrogate_pair_costs_no_points(tmp_path, grade):
    report, seen = grade(write(tmp_path, "x = '\ud800'", "factor = 2"))
    assert report.full_marks, seen


def test_a_missing_file_and_a_directory_get_one_clear_error(tmp_path):
    with pytest.raises(NotebookError, match="there is no such file"):
        grade_notebook(tmp_path / "none.ipynb")
    with pytest.raises(NotebookError, match="is no file"):
        grade_notebook(tmp_path)


def test_a_lab_that_is_not_installed_is_refused(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text().replace("98.", "97."))
    with pytest.raises(
        NotebookError, match="exercises of lab 97, which is not installed"
    ):
        grade_notebook(path)


FLOOD = """
import os, struct, time
for fd in range(3, 256):
    try:
        if "socket" in os.readlink(f"/proc/self/fd/{fd}"):
            os.write(fd, struct.pack("!i", LENGTH) + b"{")
    except OSError:
        pass
time.sleep(1000)
"""


@pytest.mark.parametrize("length", [100, 600_000_000, -7])
def test_half_a_message_or_a_flood_costs_its_cell_alone(
    tmp_path, grade, monkeypatch, length
):
    """A cell writes to the connection by which its process answers, and is silent."""
    monkeypatch.setattr(channel, "SILENCE_S", 0.5)
    monkeypatch.setattr(forks, "GRACE_S", 0.5)
    path = write(tmp_path, "factor = 2", FLOOD.replace("LENGTH", str(length)))
    report, seen = grade(path)
    assert report.full_marks, seen


def test_when_somebody_kills_the_grader_no_process_or_folder_is_left(tmp_path, judge):
    """The last test here: it ends the server that the others share."""
    note = tmp_path / "number"
    source = (
        "import pathlib, subprocess, time\n"
        "started = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(started.pid))\n"
        "time.sleep(1000)"
    )
    child = forks.Fork(judge._server, "play")
    script = {"cells": [[1, source]], "orders": [], "cell_timeout_s": GUARD_S}
    child.send({"directory": str(tmp_path), **script})
    assert wait_until(lambda: note.exists() and note.read_text() != "")
    folders = [Path(child._scratch.name), Path(judge._server.scratch.name)]
    assert all(folder.is_dir() for folder in folders)
    judge._server._connection.close()  # as its process's end does
    judge._server.process.wait(GUARD_S)
    assert wait_until(lambda: not Path(f"/proc/{note.read_text()}").exists())
    assert not any(folder.exists() for folder in folders)
