"""Grade a folder of notebooks: a row of a table and a page of feedback for each.

The table is written whole after each notebook, so that a run that was ended goes on
where it was. A notebook that cannot be graded gets a row that says why, and costs the
others nothing.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from textwrap import dedent

from overlaplab.errors import NotebookError, on_one_line, printable
from overlaplab.files import html_page, write_whole
from overlaplab.grading.cells import find_lab, read_notebook
from overlaplab.grading.children import Judge
from overlaplab.grading.notebook import GradeReport, grade_notebook

FIRST = ("notebook", "sha256", "lab", "points", "max_points", "outcome", "problem")
NOT_JUDGED, NOT_GRADED = "not judged", "not graded"
# Of a cell that a spreadsheet program would take for a formula, or for our mark of one.
_MARKED = ("=", "+", "-", "@", "\t", "\r", "'")

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1000px;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin: 28px 0 4px; }
pre { border-left: 4px solid #b35900; padding-left: 10px; white-space: pre-wrap;
  font-size: 13px; }
.passed pre { border-color: #1a7f37; }
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One notebook of a class.

    Args:
        notebook: its path in the folder, with "/".
        sha256: of its bytes, in hexadecimal.
        lab: "06", "" if it is of none.
        points, max_points: reached, and reachable in what was judged.
        outcome: "full marks", "core done", "not yet", "not judged" if this machine was
            too busy for some exercise, "not graded" if it is no lab's notebook.
        problem: why it was not graded, or is graded without a page; one line.
        exercises: points by number, "" where an exercise was not judged.
    """

    notebook: str
    sha256: str
    lab: str = ""
    points: int = 0
    max_points: int = 0
    outcome: str = NOT_GRADED
    problem: str = ""
    exercises: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        name = on_one_line(self.notebook)
        if self.outcome == NOT_GRADED:
            return f"{name}: {self.problem}"
        without = f"; {self.problem}" if self.problem else ""
        marks = f"{self.points}/{self.max_points}, {self.outcome}"
        return f"{name}: {marks}{without}"


@dataclass(frozen=True, slots=True)
class ClassReport:
    """The marks of a class, by path.

    Args:
        rows: one for each notebook.
        num_kept: of these, rows that an earlier run had made.
    """

    rows: tuple[Row, ...]
    num_kept: int = 0

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.outcome] = counts.get(row.outcome, 0) + 1
        found = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        kept = f"; {self.num_kept} from the run before" if self.num_kept else ""
        return f"{len(self.rows)} notebooks: {found}{kept}"


def grade_class(
    folder: str | Path,
    table: str | Path,
    *,
    pages: str | Path | None = None,
    num_jobs: int | None = None,
    timeout_s: float = 3600.0,
    modules: Sequence[str] = (),
    done: Callable[[int, int, Row], None] = lambda number, total, row: None,
) -> ClassReport:
    """Grade every notebook below `folder`, several at a time.

    Run again with the same `table`, it grades what is new, has changed since, was not
    judged, or lacks its page. Delete the table after the graders have changed.

    Args:
        folder: searched for *.ipynb; hidden files and folders are left out.
        table: the CSV file to write; its folder must exist.
        pages: folder for a page of feedback (HTML) for each notebook, at the same path
            within; made if it is missing.
        num_jobs: notebooks at a time; None: as many as this process has cores.
        timeout_s: deadline of one notebook, on the wall.
        modules: with exercises of an instructor's own, see `Judge`.
        done: called with each new row, how many there are by now, and of how many.

    Raises:
        NotebookError: no folder, or no notebook below it.
        ValueError: `table` is there, and no table of this function, or that of another
            folder; `pages` is a file; `num_jobs` < 1.
        OSError: the table cannot be written.
    """
    folder, table = Path(folder), Path(table)
    pages = None if pages is None else Path(pages)
    jobs = len(os.sched_getaffinity(0)) if num_jobs is None else num_jobs
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected 1 or more")
    paths = _find(folder)
    before = _read(table)
    if before and not before.keys() & set(map(_as_written, paths)):
        raise ValueError(
            f"{table} has the marks of another folder: none of its {len(before)} "
            f"notebooks is below {folder}. Give another name, or delete it."
        )
    rows: dict[str, Row] = {}
    for name, path in paths.items():
        row = before.get(_as_written(name))
        row = row and replace(row, notebook=name)
        if row is not None and _is_done(row, path, pages):
            rows[name] = row
    num_kept = len(rows)
    if pages is not None and pages.exists() and not pages.is_dir():
        raise ValueError(f"{pages} is a file; expected a folder for the pages")
    _write(table, rows)  # refused before an hour of work, not after
    if pages is not None:
        pages.mkdir(parents=True, exist_ok=True)
    todo = {name: path for name, path in paths.items() if name not in rows}
    with _judges(modules) as judge, ThreadPoolExecutor(min(jobs, 64)) as pool:
        work: dict[Future[tuple[Row, str]], str] = {
            pool.submit(_grade, judge, name, path, timeout_s): name
            for name, path in todo.items()
        }
        try:
            for future in as_completed(work):
                row, page = future.result()
                if pages is not None and page:
                    row = _write_page(row, page, pages)
                rows[row.notebook] = row
                _write(table, rows)
                done(len(rows), len(paths), row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            judge.end()  # or its threads would be waited for
            raise
    return ClassReport(tuple(rows[name] for name in paths), num_kept)


class _Judges:
    """A judge for each thread, which is used for one notebook after another."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._of = threading.local()
        self._all: list[Judge] = []

    def mine(self) -> Judge:
        judge: Judge | None = getattr(self._of, "judge", None)
        if judge is None:
            judge = self._of.judge = Judge(self._modules)
            self._all.append(judge)
        return judge

    def end(self) -> None:
        for judge in self._all:
            judge.close()


@contextmanager
def _judges(modules: Sequence[str]) -> Iterator[_Judges]:
    judges = _Judges(modules)
    try:
        yield judges
    finally:
        judges.end()


def _grade(judges: _Judges, name: str, path: Path, timeout_s: float) -> tuple[Row, str]:
    """The row and the page of one notebook; "" for what could not be graded."""
    digest, lab = "", ""
    try:
        digest = _digest(path)
        lab = find_lab(read_notebook(path), path)
        report = grade_notebook(path, timeout_s=timeout_s, judge=judges.mine())
    except (NotebookError, OSError) as error:
        what = on_one_line(str(error).replace(printable(f"{path}: "), ""))
        return Row(name, digest, lab, problem=what), ""
    row = Row(
        name,
        digest,
        report.lab,
        report.points,
        report.max_points,
        _outcome(report),
        exercises={
            r.exercise: str(r.points) if r.judged else "" for r in report.results
        },
    )
    return row, _page(name, report)


def _outcome(report: GradeReport) -> str:
    if not report.all_judged:
        return NOT_JUDGED
    if report.full_marks:
        return "full marks"
    return "core done" if report.core_passed else "not yet"


def _find(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise NotebookError(f"{folder}: is no folder; expected one with notebooks")
    found = {}
    for path in folder.rglob("*.ipynb"):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            found[inside.as_posix()] = path
    if not found:
        raise NotebookError(f"{folder}: there is no notebook (*.ipynb) below it")
    return dict(sorted(found.items()))


def _is_done(row: Row, path: Path, pages: Path | None) -> bool:
    """Whether an earlier run has graded what is there now."""
    try:
        same = row.sha256 == _digest(path)
    except OSError:  # said in its new row
        return False
    return same and row.outcome != NOT_JUDGED and _has_page(row, pages)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# The table.


def _write(table: Path, rows: Mapping[str, Row]) -> None:
    """The whole table, with a column for each exercise of the labs that occur."""
    numbers = sorted({n for row in rows.values() for n in row.exercises}, key=_number)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([*FIRST, *numbers])
    for name in sorted(rows):
        row = rows[name]
        cells = [_plain(str(getattr(row, key))) for key in FIRST]
        writer.writerow([*cells, *(row.exercises.get(n, "") for n in numbers)])
    # Spreadsheet programs take it for UTF-8 if it begins so.
    write_whole(table, text.getvalue().encode("utf-8-sig", "backslashreplace"))


def _read(table: Path) -> dict[str, Row]:
    """What an earlier run wrote."""
    if not table.exists():
        return {}
    try:
        text = table.read_bytes().decode("utf-8-sig")  # names keep their line ends
        lines = list(csv.reader(io.StringIO(text, newline="")))
        head = lines[0]
        if tuple(head[: len(FIRST)]) != FIRST:
            raise ValueError
        rows = [_row(dict(zip(head, line, strict=True))) for line in lines[1:]]
    except (ValueError, IndexError, KeyError, csv.Error):
        raise ValueError(
            f"{table} is there, and is no table that `overlaplab grade` wrote. Give "
            "another name, or delete it."
        ) from None
    return {row.notebook: row for row in rows}


def _row(cells: dict[str, str]) -> Row:
    name, sha256, lab, points, most, outcome, problem = (cells.pop(k) for k in FIRST)
    # A notebook may call its lab anything.
    marks = {n: p for n, p in cells.items() if f"{_number(n)[0]:02}" == lab}
    return Row(
        name.removeprefix("'"),
        sha256,
        lab,
        int(points),
        int(most),
        outcome,
        problem.removeprefix("'"),
        marks,
    )


def _as_written(name: str) -> str:
    """A file's name as the table has it: some are no text."""
    return name.encode("utf-8", "backslashreplace").decode()


def _plain(text: str) -> str:
    """As text in a spreadsheet, too: a file's name may look like a formula."""
    return f"'{text}" if text.startswith(_MARKED) else text


def _number(exercise: str) -> tuple[int, int, str]:
    lab, rest = exercise.split(".")
    digits = rest.rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(lab), int(digits), rest[len(digits) :]


# The pages.


def _page_of(name: str, pages: Path) -> Path:
    return pages / f"{name.removesuffix('.ipynb')}.html"


def _write_page(row: Row, page: str, pages: Path) -> Row:
    """The row, which says so if the page cannot be written: its name is too long, or
    there is a folder of that name."""
    place = _page_of(row.notebook, pages)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        return replace(row, problem=f"has no page of feedback: {error.strerror}")
    return row


def _has_page(row: Row, pages: Path | None) -> bool:
    if pages is None or row.outcome == NOT_GRADED:
        return True
    return _page_of(row.notebook, pages).is_file()


def _page(name: str, report: GradeReport) -> str:
    left = ", ".join(r.exercise for r in report.results if not r.passed)
    left = f" Still open: {left}." if left else ""
    parts = [
        f"<h1>{escape(name)}: {report.points} of {report.max_points} points</h1>",
        f"<p>Lab {escape(report.lab)}, {escape(_outcome(report))}.{escape(left)}</p>",
    ]
    for result in report.results:
        style = "passed" if result.passed else "open"
        _, _, said = result.says.partition("\n")  # the heading says its first line
        parts.append(
            f'<section class="{style}"><h2>{escape(result.name)}: '
            f"{result.points}/{result.max_points}, {result.outcome}</h2>"
            f"<pre>{escape(dedent(said))}</pre></section>"
        )
    return html_page(name, _STYLE, "\n".join(parts) + "\n")
