"""A folder of notebooks: a row and a page for each, whatever one of them does."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlaplab.errors import NotebookError
from overlaplab.grading import classroom
from overlaplab.grading.children import Judge
from overlaplab.grading.classroom import ClassReport, Row, grade_class
from tests.grading.test_notebook import MODULES, write
from tests.guards import GUARD_S


def grade(folder: Path, table: Path, **more: Any) -> ClassReport:
    settings: dict[str, Any] = {"modules": MODULES, "num_jobs": 1, "timeout_s": GUARD_S}
    return grade_class(folder, table, **settings | more)


def add(folder: Path, *sources: str, **solved: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write(folder, *sources, **solved)


def read(table: Path) -> dict[str, dict[str, str]]:
    with table.open(encoding="utf-8-sig", newline="") as file:
        return {row["notebook"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right, half right, one that kills its process, one that is no notebook."""
    folder = tmp_path_factory.mktemp("room")
    add(folder / "class" / "ada", "factor = 2")
    add(folder / "class" / "ben", "factor = 3")
    add(folder / "class" / "eve", "import os\nos._exit(7)", "factor = 2")
    add(folder / "class" / ".ipynb_checkpoints", "factor = 2")
    (folder / "class" / "zoe.ipynb").write_text("<html>")
    return folder


@pytest.fixture(scope="module")
def graded(room: Path) -> ClassReport:
    return grade(room / "class", room / "marks.csv", pages=room / "pages", num_jobs=2)


@pytest.fixture
def one_judge(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have the same, since to start one takes seconds."""
    monkeypatch.setattr(classroom._Judges, "mine", lambda _: judge)


def test_one_broken_notebook_stops_nobody(graded: ClassReport) -> None:
    assert [str(row) for row in graded.rows[:3]] == [
        "ada/lab.ipynb: 4/4, full marks",
        "ben/lab.ipynb: 3/4, not yet",
        "eve/lab.ipynb: 4/4, full marks",  # the cell that ends all is left out
    ]
    assert graded.rows[3].outcome == "not graded"
    assert graded.rows[3].problem.startswith("is not a notebook: no JSON")
    assert str(graded).startswith("4 notebooks: 2 full marks, 1 not yet, 1 not graded")


def test_the_table_has_a_column_for_each_exercise(room, graded) -> None:
    rows = read(room / "marks.csv")
    assert list(rows) == [row.notebook for row in graded.rows]
    marks = {
        name: [row[n] for n in ("98.1", "98.2", "98.3")] for name, row in rows.items()
    }
    assert marks["ben/lab.ipynb"] == ["0", "2", "1"]
    assert marks["zoe.ipynb"] == ["", "", ""]


def test_each_notebook_that_was_graded_has_a_page(room, graded) -> None:
    pages = {p.relative_to(room / "pages").as_posix() for p in room.rglob("*.html")}
    assert pages == {"ada/lab.html", "ben/lab.html", "eve/lab.html"}
    text = " ".join((room / "pages" / "ben" / "lab.html").read_text().split())
    assert "3 of 4 points" in text and "median ratio to the right value is 1.5" in text
    assert "Lab 98, not yet. Still open: 98.1." in text
    assert text.count("98.1 Double") == 1 and "<pre>ran: double on three" in text


@pytest.mark.usefixtures("one_judge")
def test_a_second_run_grades_what_has_changed(room, graded, tmp_path) -> None:
    shutil.copytree(room, tmp_path, dirs_exist_ok=True)
    again: list[str] = []

    def run() -> ClassReport:
        again.clear()
        return grade(
            tmp_path / "class",
            tmp_path / "marks.csv",
            pages=tmp_path / "pages",
            done=lambda number, total, row: again.append(row.notebook),
        )

    first = run()
    assert first.rows == graded.rows and first.num_kept == 4 and again == []
    add(tmp_path / "class" / "ben", "factor = 2")
    (tmp_path / "pages" / "ada" / "lab.html").unlink()
    second = run()
    assert sorted(again) == ["ada/lab.ipynb", "ben/lab.ipynb"]
    assert second.rows[1].outcome == "full marks" and second.num_kept == 2


@pytest.mark.usefixtures("one_judge")
def test_a_run_that_is_ended_leaves_the_rows_that_it_had(tmp_path) -> None:
    for name in "abc":
        add(tmp_path / "class" / name, "factor = 2")

    def stop(number: int, total: int, row: Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(tmp_path / "class", tmp_path / "marks.csv", done=stop)
    assert len(read(tmp_path / "marks.csv")) == 1
    left: list[str] = []
    report = grade(
        tmp_path / "class",
        tmp_path / "marks.csv",
        done=lambda number, total, row: left.append(row.notebook),
    )
    assert len(left) == 2 and report.num_kept == 1
    assert {row.outcome for row in report.rows} == {"full marks"}


@pytest.mark.usefixtures("one_judge")
def test_a_notebook_that_was_not_judged_is_graded_again(tmp_path) -> None:
    path = add(tmp_path / "class", "factor = 2")
    row = Row("lab.ipynb", classroom._digest(path), "98", 1, 1, "not judged")
    classroom._write(tmp_path / "marks.csv", {row.notebook: row})
    report = grade(tmp_path / "class", tmp_path / "marks.csv")
    assert report.num_kept == 0 and report.rows[0].outcome == "full marks"


@pytest.fixture
def full_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every notebook that can be read has them, at once."""

    def grade_at_once(judges: object, name: str, path: Path, timeout_s: float) -> Any:
        try:
            row = Row(name, classroom._digest(path), "98", 1, 1, "full marks")
        except OSError as error:
            return Row(name, "", problem=str(error)), ""
        return row, f"<p>{name}</p>"

    monkeypatch.setattr(classroom, "_grade", grade_at_once)


def test_a_notebook_that_cannot_be_read_stops_no_run(tmp_path, full_marks) -> None:
    """Nor the second, which compares it with its row."""
    add(tmp_path / "class", "factor = 2")
    (tmp_path / "class" / "mem.ipynb").symlink_to("/proc/self/mem")
    for num_kept in (0, 1):
        report = grade(tmp_path / "class", tmp_path / "marks.csv")
        assert [row.outcome for row in report.rows] == ["full marks", "not graded"]
        assert report.num_kept == num_kept


def test_a_name_of_several_lines_keeps_the_reason_and_colours_nothing(tmp_path) -> None:
    (tmp_path / "a\n\x1b[31mb.ipynb").write_text("null")
    (row,) = grade_class(tmp_path, tmp_path / "marks.csv").rows
    assert row.problem.startswith("is not a notebook")
    assert str(row).startswith("a \\x1b[31mb.ipynb: is not") and "\n" not in str(row)


def test_files_of_any_name_are_kept_and_have_pages(tmp_path, full_marks) -> None:
    names = ["a\nb", "c\rd", "e\r\nf", "=g", "'h", os.fsdecode(b"i\xff"), "j" * 246]
    (tmp_path / "class").mkdir()
    for name in names:
        (tmp_path / "class" / f"{name}.ipynb").write_text("")
    for num_kept in (0, len(names)):
        report = grade(
            tmp_path / "class", tmp_path / "marks.csv", pages=tmp_path / "pages"
        )
        assert report.num_kept == num_kept
        assert {row.notebook for row in report.rows} == {f"{n}.ipynb" for n in names}
    assert {p.stem for p in (tmp_path / "pages").iterdir()} == set(names)


def test_a_page_that_cannot_be_written_stops_no_run(tmp_path, full_marks) -> None:
    for name in ("a.ipynb", "a.html/b.ipynb"):
        path = tmp_path / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "pages" / "a.html").mkdir(parents=True)
    report = grade(tmp_path / "class", tmp_path / "marks.csv", pages=tmp_path / "pages")
    assert [str(row) for row in report.rows] == [
        "a.html/b.ipynb: 1/1, full marks",
        "a.ipynb: 1/1, full marks; has no page of feedback: Is a directory",
    ]
    assert not list((tmp_path / "pages").glob(".*"))


def test_a_table_of_another_folder_keeps_its_marks(tmp_path, full_marks) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.ipynb").write_text("")
    table = tmp_path / "marks.csv"
    grade(tmp_path / "a", table)
    before = table.read_text()
    with pytest.raises(ValueError, match="has the marks of another folder"):
        grade(tmp_path / "b", table)
    assert table.read_text() == before


def test_what_cannot_be_written_is_said_at_once(tmp_path) -> None:
    """With the name that was given, and before anything is graded."""
    add(tmp_path / "class", "factor = 2")
    table, file = tmp_path / "no" / "marks.csv", tmp_path / "file"
    with pytest.raises(FileNotFoundError) as missing:
        grade(tmp_path / "class", table)
    assert missing.value.filename == str(table)
    file.write_text("mine")
    with pytest.raises(ValueError, match="file is a file; expected a folder"):
        grade(tmp_path / "class", tmp_path / "marks.csv", pages=file)
    assert file.read_text() == "mine" and not (tmp_path / "marks.csv").exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "a,b\n1,2\n", "notebook,sha256,lab\n", '"' + "x" * 200_000),
        ",".join(classroom.FIRST) + ",remarks\na,,,0,0,not graded,,late\n",
    ],
)
def test_a_table_of_somebody_elses_is_left_as_it_was(tmp_path, text) -> None:
    add(tmp_path / "class", "factor = 2")
    table = tmp_path / "budget.csv"
    table.write_text(text)
    with pytest.raises(ValueError, match="is no table that `overlaplab grade` wrote"):
        grade(tmp_path / "class", table)
    assert table.read_text() == text


def test_rows_are_read_as_they_were_written(tmp_path) -> None:
    """Names like formulas and with line ends, labs that differ, problems."""
    rows = [
        Row(
            "=cmd|' /C calc'!A0.ipynb",
            "0" * 64,
            "06",
            3,
            4,
            "not yet",
            "",
            {"6.1": "3"},
        ),
        Row('a,\n"b".ipynb', "1" * 64, "10", 2, 2, "core done", "", {"10.2": "2"}),
        Row("no.ipynb", "2" * 64, problem="is not a notebook"),
        Row("odd.ipynb", "3" * 64, "z\n", problem="exercises of lab z"),
    ]
    table = tmp_path / "marks.csv"
    classroom._write(table, {row.notebook: row for row in rows})
    assert "\n=" not in table.read_text() and not table.read_text().startswith("=")
    found = classroom._read(table)
    for row in rows:
        marks = {n: p for n, p in found[row.notebook].exercises.items() if p}
        assert marks == row.exercises
        assert found[row.notebook].outcome == row.outcome


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is no folder"),
        (lambda folder: folder.mkdir(), "there is no notebook"),
    ],
)
def test_nothing_to_grade_is_said(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "class")
    with pytest.raises(NotebookError, match=message):
        grade(tmp_path / "class", tmp_path / "marks.csv")
    assert not (tmp_path / "marks.csv").exists()


def test_a_verdict_comes_back_from_json_and_says_the_same() -> None:
    from overlaplab.grading.verdict import CheckResult, Verdict

    verdict = Verdict(
        "6.1",
        "The plan",
        False,
        ran="a plan",
        checks=(CheckResult("a", True), CheckResult("b", False, "1\n2", "3", "so")),
        hint="so",
        unjudged=("c",),
        step_ns=5,
        target_ns=4,
    )
    back = Verdict.from_dict(json.loads(json.dumps(verdict.to_dict())))
    assert str(back) == str(verdict)
