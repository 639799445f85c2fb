"""The plugin under which CI runs nbval: a time-out and an empty run are failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

import notebook_runs as runs
from tests.guards import GUARD_S

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
HEAD = "import pytest\n\n\ndef test_a():\n    pass\n\n\n"


def run_strictly(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on `folder` with the plugin, away from this project's settings."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.strict_notebooks"]
    command += ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder)]
    command += [*options, str(folder)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("@pytest.mark.xfail\ndef test_b():\n    assert 0\n", 1),
        ("@pytest.mark.xfail\ndef test_b():\n    pass\n", 1),
    ],
    ids=["all pass", "one XFAIL", "one XPASS"],
)
def test_a_run_is_good_only_where_nothing_was_expected_to_fail(
    pytester: pytest.Pytester, body: str, code: int
) -> None:
    pytester.makepyfile(HEAD + body)

    result = pytester.runpytest_inprocess("-p", "tests.strict_notebooks")

    assert result.ret == code
    assert ("::test_b" in result.stdout.str()) == bool(code)


def test_the_controller_of_several_workers_sees_their_cells(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        HEAD + "@pytest.mark.xfail\ndef test_b():\n    assert 0\n"
    )

    result = run_strictly(tmp_path, "-p", "xdist", "-n", "1")

    assert result.returncode == 1, result.stdout + result.stderr
    assert "test_x.py::test_b" in result.stdout


@pytest.mark.parametrize("body", ["", HEAD.replace("pass", "pytest.skip()")])
def test_a_run_in_which_nothing_passed_fails(
    pytester: pytest.Pytester, body: str
) -> None:
    pytester.makepyfile(body)

    result = pytester.runpytest_inprocess("-p", "tests.strict_notebooks")

    assert result.ret != 0
    result.stdout.fnmatch_lines(["*no cell of a notebook passed*"])


def test_a_cell_that_hangs_fails_the_run_of_its_notebook(tmp_path: Path) -> None:
    cells = [new_code_cell("while True: pass", id="a"), new_code_cell("1", id="b")]
    notebook = new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    runs.write(notebook, tmp_path / "06_x.ipynb")

    result = run_strictly(
        tmp_path,
        *("-p", "nbval.plugin", "--nbval-lax", "--nbval-cell-timeout", "1"),
        *("--nbval-kernel-startup-timeout", str(GUARD_S)),
    )

    assert result.returncode == 1, result.stdout + result.stderr
    assert "cells that timed out (XFAIL or XPASS)" in result.stdout
    assert "06_x.ipynb::Cell 1" in result.stdout


def test_nbval_is_red_at_the_checks_that_a_learner_has_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a front end they are red and the notebook goes on; here each of them fails."""
    sources = [
        "from overlaplab.grading import check\nfrom tests.grading import lab98",
        "_ = check('98.1', lambda x: 2 * x)",
        "_ = check('98.1', lambda x: 3 * x)",
        "'this cell runs'",
    ]
    cells = [new_code_cell(text, id=f"c{n}") for n, text in enumerate(sources)]
    runs.write(new_notebook(cells=cells), tmp_path / "98_x.ipynb")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "course")]))

    result = run_strictly(
        tmp_path,
        *("-p", "nbval.plugin", "--nbval-lax", "--nbval-cell-timeout", str(GUARD_S)),
        *("--nbval-kernel-startup-timeout", str(GUARD_S), "--nbval-current-env"),
    )

    assert "1 failed, 3 passed" in result.stdout, result.stdout + result.stderr
    assert "98_x.ipynb::Cell 2" in result.stdout
    assert "CheckFailed: 98.1 is not solved yet" in result.stdout
