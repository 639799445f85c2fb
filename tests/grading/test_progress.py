"""What is solved is read from saved notebooks; nothing in them is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from overlaplab.errors import NotebookError
from overlaplab.grading.progress import LabProgress, next_lab, read_progress

ROOT = Path(__file__).parents[2]


def write(path: Path, *cells: Any) -> Path:
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


def checked(number: str, *printed: str) -> Any:
    cell = new_code_cell(f'_ = check("{number}", answer)')
    cell.outputs = [new_output("stream", text=text) for text in printed]
    return cell


def test_solutions_are_done_and_labs_as_handed_out_are_not_begun() -> None:
    labs = read_progress(ROOT / "labs")
    assert [(lab.solved, lab.tried) for lab in labs] == [((), False)] * len(labs)
    for solution, lab in zip(read_progress(ROOT / "solutions"), labs, strict=True):
        assert (solution.solved, solution.left) == (lab.left, ())
        assert str(solution).endswith("done")


def test_the_last_verdict_below_the_check_itself_counts(tmp_path: Path) -> None:
    raised = checked("91.3")
    raised.outputs = [
        new_output("error", ename="CheckFailed", evalue="91.3 the rest: not yet\n  - x")
    ]
    boast = new_code_cell("print('91.4 mine: passed')")
    boast.outputs = [new_output("stream", text="91.4 mine: passed\n")]
    write(
        tmp_path / "91_own.ipynb",
        checked("91.1", "91.1 one: not yet\n  - no\n", "91.1 one: passed\n  + yes\n"),
        checked("91.2", "91.2 two: not judged\n"),
        raised,
        boast,
        checked("91.4"),
    )
    write(tmp_path / "notes.ipynb", new_code_cell("1 + 1"))
    [lab] = read_progress(tmp_path)
    assert (lab.solved, lab.left) == (("91.1",), ("91.2", "91.3", "91.4"))
    assert str(lab).split() == ["91_own", "1", "of", "4", "next:", "91.2"]


def test_the_next_lab_is_named_where_none_is_half_done() -> None:
    whole, new = ("0.1",), ("1.0", "1.1")
    done = LabProgress(Path("00_start.ipynb"), whole, (), tried=True)
    begun = LabProgress(Path("01_more.ipynb"), ("1.0",), ("1.1",), tried=True)
    fresh = LabProgress(Path("02_rest.ipynb"), (), new, tried=False)
    assert next_lab([done, fresh]) is fresh
    assert next_lab([done, begun, fresh]) is None  # its own line says what is next
    assert next_lab([done]) is None


def test_a_folder_without_labs_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="no lab in it; expected notebooks such as"):
        read_progress(tmp_path)
    with pytest.raises(NotebookError, match="no such folder"):
        read_progress(tmp_path / "gone")
    (tmp_path / "00_start.ipynb").write_text('{"nbformat": 4, "cells": [3]}')
    with pytest.raises(NotebookError, match=r"00_start\.ipynb, cell 1"):
        read_progress(tmp_path)


def test_a_name_of_several_lines_and_colours_is_one_line_of_text() -> None:
    lab = LabProgress(Path("00_\x1b[31m\nred.ipynb"), ("0.1",), (), tried=True)
    assert str(lab).startswith("00_\\x1b[31m red ") and "\n" not in str(lab)
