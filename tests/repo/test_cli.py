"""The command line: one clear line for bad input, exit codes, no traceback of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import overlaplab
from overlaplab import cli
from overlaplab.errors import NotebookError
from overlaplab.version import find_version
from tests.guards import GUARD_S


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def command_that_raises(error: BaseException) -> Callable[[], None]:
    @cli._one_error_line()
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NotebookError("a.ipynb is no notebook"), 2, "a.ipynb is no notebook"),
        (ValueError("world_size is 0"), 2, "world_size is 0"),
        (TypeError("cannot copy fn"), 2, "cannot copy fn"),
        (FileNotFoundError(2, "No such file", "x"), 2, "No such file: 'x'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_the_user_can_repair_is_one_line_and_a_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command_that_raises(error)()

    assert caught.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("overlaplab: ") and said in line


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in `overlaplab report TRACE | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "from overlaplab.cli import main; main()"
    trace = str(Path(__file__).parents[1] / "traces/hta/hta_cpu_only.json.gz")
    run = subprocess.run(
        [sys.executable, "-c", program, "report", trace],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=GUARD_S,
    )
    os.close(writing)
    assert run.stderr == b""


def test_a_fault_of_the_package_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        command_that_raises(KeyError("ours"))()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["demo", "--cluster", "cloud"], ["cloud", "virtual", "gloo", "nccl"]),
        (["demo", "--hardware", "h9000"], ["h9000", "h100-nvlink"]),
        (["demo", "--ranks", "0"], ["--ranks", "0", "x>=1"]),
        (["demo", "--steps", "1"], ["steps", "1", "2 or more"]),
        (["demo", "--ranks", "many"], ["many"]),
        (["demo", "--out", "no/such/place.png"], ["no/such/place.png"]),
        (["demo", "--out", ""], ["no figure's file", ".png"]),
        (["demo", "--out", "demo.doc"], ["demo.doc", ".png"]),
        (["grade", "no-such-file.ipynb"], ["no-such-file.ipynb"]),
        (["grade"], ["PATH"]),
        (["grade", "."], ["is a folder", "--csv marks.csv"]),
        (["grade", "a.ipynb", "--html", "x"], ["one notebook", "with --csv"]),
        (["progress", "tests"], ["no lab in it", "overlaplab progress FOLDER"]),
        (["train"], ["train"]),
    ],
)
def test_bad_arguments_are_named_with_exit_code_2(
    arguments: list[str], facts: list[str]
) -> None:
    result = call(*arguments)

    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    for fact in facts:
        assert fact in result.stderr


@pytest.mark.parametrize("text", ["", "not JSON", "[]", '{"cells": []}', "print(1)"])
def test_a_file_that_is_no_lab_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.ipynb"
    path.write_text(text)

    result = call("grade", str(path))

    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "mine.ipynb" in result.stderr


class _Report:
    """A grade report of so many points out of ten."""

    def __init__(self, points: int) -> None:
        self.full_marks = points == 10
        self.all_judged = points != 8
        self.points = points

    def __str__(self) -> str:
        return f"together {self.points}/10"

    def to_dict(self) -> dict[str, int]:
        return {"points": self.points}


@pytest.mark.parametrize(("points", "code"), [(10, 0), (9, 1), (8, 4)])
def test_grade_exits_with_0_only_for_full_marks_and_with_4_if_not_judged(
    monkeypatch: pytest.MonkeyPatch, points: int, code: int
) -> None:
    from overlaplab.grading import notebook

    monkeypatch.setattr(notebook, "grade_notebook", lambda path, **_: _Report(points))

    plain, as_json = call("grade", "x.ipynb"), call("grade", "x.ipynb", "--json")

    assert (plain.exit_code, as_json.exit_code) == (code, code)
    assert plain.stdout == f"together {points}/10\n"
    assert json.loads(as_json.stdout) == {"points": points}


def test_version_and_help_answer() -> None:
    assert call("--version").stdout == f"overlaplab {version('overlaplab')}\n"
    for command in ([], ["demo"], ["grade"]):
        assert call(*command, "--help").exit_code == 0
    assert isinstance(cli.main, click.Group)


def test_the_version_is_the_installed_one_and_costs_an_import_nothing() -> None:
    assert overlaplab.__version__ == version("overlaplab")
    program = "import sys, overlaplab; print('importlib.metadata' in sys.modules)"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize(
    ("pyproject", "found"),
    [
        ('[project]\nname = "overlaplab"\nversion = "7.1"', "7.1"),
        ('[project]\nname = "another"\nversion = "7.1"', "0+unknown"),
        ("[project]", "0+unknown"),
        ("not TOML", "0+unknown"),
        (None, "0+unknown"),
    ],
)
def test_a_tree_that_is_not_installed_has_the_version_of_its_project(
    pyproject: str | None,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("overlaplab.version.version", absent)
    if pyproject is not None:
        (tmp_path / "pyproject.toml").write_text(pyproject)
    assert find_version(tmp_path) == found


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "overlaplab", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert (ran.returncode, ran.stdout) == (0, f"overlaplab {version('overlaplab')}\n")
