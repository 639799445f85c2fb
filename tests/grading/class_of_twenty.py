"""A class of 20 on this machine: graded, killed in the middle, gone on with.

    python -m tests.grading.class_of_twenty [FOLDER]

Copies of every lab, solved, half solved and as handed out, are graded as an instructor
would; after a third of them the grader is killed. Prints what each run took, and fails
if a mark is not as expected or a row was lost. Minutes, so CI does not run it.
"""

from __future__ import annotations

import csv
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
SIZE = 20
CLI = "from overlaplab.cli import main; main()"


def write_class(folder: Path) -> dict[str, str]:
    """20 notebooks, a folder each; what is in each by its path."""
    labs = sorted((ROOT / "labs").glob("*.ipynb"))
    kinds = ("solved", "half solved", "handed out")
    written = {}
    for number in range(SIZE):
        lab, kind = labs[number % len(labs)], kinds[number // len(labs)]
        notebook = nbformat.read(lab, as_version=4)
        solved = nbformat.read(ROOT / "solutions" / lab.name, as_version=4)
        answers = {cell.id: cell.source for cell in solved.cells}
        gaps = [c for c in notebook.cells if "exercise" in c.metadata.get("tags", ())]
        keep = {"solved": len(gaps), "half solved": len(gaps) // 2, "handed out": 0}
        for cell in gaps[: keep[kind]]:
            cell.source = answers[cell.id]
        path = folder / f"learner{number:02}" / lab.name
        path.parent.mkdir()
        nbformat.write(notebook, path)
        written[path.relative_to(folder).as_posix()] = kind
    return written


def read(table: Path) -> dict[str, dict[str, str]]:
    if not table.exists():
        return {}
    with table.open(encoding="utf-8-sig", newline="") as file:
        return {row["notebook"]: row for row in csv.DictReader(file)}


def grade(folder: Path, table: Path, *, kill_after: int = SIZE) -> int:
    """Run `overlaplab grade`; killed when the table has that many rows, if at all."""
    command = [sys.executable, "-c", CLI, "grade", str(folder / "class")]
    command += ["--csv", str(table), "--html", str(folder / "pages"), "--jobs", "2"]
    start = time.monotonic()
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while running.poll() is None:
        if kill_after < SIZE and len(read(table)) >= kill_after:
            os.kill(running.pid, signal.SIGKILL)
        time.sleep(1)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(read(table))} rows after {time.monotonic() - start:.0f} s; "
        f"CPU so far at least {used.ru_utime + used.ru_stime:.0f} s"
    )
    return running.returncode


def main(folder: Path) -> None:
    (folder / "class").mkdir()
    table = folder / "marks.csv"
    written = write_class(folder / "class")
    assert grade(folder, table, kill_after=SIZE // 3) == -signal.SIGKILL
    before = read(table)
    assert len(before) < SIZE
    assert grade(folder, table) == 0
    rows = read(table)
    assert rows.keys() == written.keys()
    assert {name: rows[name] for name in before}.items() <= rows.items()
    wrong = []
    for name, kind in written.items():
        points, most = int(rows[name]["points"]), int(rows[name]["max_points"])
        print(f"{name:<45} {kind:<12} {points:>3}/{most} {rows[name]['outcome']}")
        right = {
            "solved": rows[name]["outcome"] == "full marks",
            "half solved": 0 < points < most,
            "handed out": points == 0,
        }
        wrong += [] if right[kind] else [name]
    assert not wrong, wrong
    assert len(list((folder / "pages").rglob("*.html"))) == SIZE


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir()
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
