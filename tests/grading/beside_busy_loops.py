"""The solved labs beside four busy loops: no right solution may be refused.

    python -m tests.grading.beside_busy_loops [LAB ...]

Grades each solved lab ("03", all by default) while four processes compute all the time,
and fails if one does not get full marks: time limits are the learner's CPU time, and a
slow machine costs no point. Minutes, so CI does not run it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from overlaplab.grading.notebook import GradeReport, grade_notebook

SOLUTIONS = Path(__file__).parents[2] / "solutions"
NUM_LOOPS = 4
# Ends with the process that started it, however that one ends.
LOOP = "import os\nwhile os.getppid() == {}:\n    sum(range(100_000))\n"


def graded(lab: str) -> bool:
    """Grade the solution of `lab` and print what it got."""
    (path,) = SOLUTIONS.glob(f"{lab}_*.ipynb")
    start = time.monotonic()
    report: GradeReport = grade_notebook(path)
    took_s = time.monotonic() - start
    print(f"{path.name}: {report.points}/{report.max_points} after {took_s:.0f} s")
    if not report.full_marks:
        print(report)
    return report.full_marks


def main(labs: list[str]) -> int:
    """The number of solved labs that did not get full marks."""
    loop = [sys.executable, "-c", LOOP.format(os.getpid())]
    loops = [subprocess.Popen(loop) for _ in range(NUM_LOOPS)]
    try:
        right = [graded(lab) for lab in labs]
        assert all(process.poll() is None for process in loops), "a loop has ended"
        return right.count(False)
    finally:
        for process in loops:
            process.kill()
            process.wait()


if __name__ == "__main__":
    every = sorted(path.name[:2] for path in SOLUTIONS.glob("*.ipynb"))
    sys.exit(main(sys.argv[1:] or every))
