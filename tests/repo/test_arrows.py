"""`make test-arrows` fails for an upward arrow or a circle, wherever it stands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, the course's code and the contracts, to be spoilt."""
    only_code = shutil.ignore_patterns("__pycache__", "*.json", "*.gz", "*.js")
    for name in ("overlaplab", "course/overlaplab_course"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=only_code)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(folder / "course")])
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


def test_the_contracts_hold_as_the_code_stands(copy: Path) -> None:
    answer = check(copy)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        (
            "overlaplab/timeline/span.py",
            "import overlaplab.view.page",
            "overlaplab.timeline is not allowed to import overlaplab.view",
        ),
        (
            "overlaplab/timeline/span.py",
            HIDDEN + "import overlaplab.hardware.model",
            "overlaplab.timeline is not allowed to import overlaplab.hardware",
        ),
        (
            "overlaplab/timeline/span.py",
            HIDDEN + "import overlaplab.timeline.timeline",
            "No cycles are allowed in overlaplab.timeline",
        ),
        (
            "course/overlaplab_course/lab01/checks.py",
            "import overlaplab_course.lab06\nimport overlaplab_course.lab01.later",
            "No cycles are allowed in overlaplab_course.lab01",
        ),
        (
            "overlaplab/grading/exercise.py",
            "import overlaplab_course.lab06",
            "overlaplab is not allowed to import overlaplab_course",
        ),
        (
            "overlaplab/capture/__init__.py",
            "import overlaplab.techniques",
            "overlaplab.capture is not allowed to import overlaplab.techniques",
        ),
        ("overlaplab/program/record.py", "import torch", "torch"),
        ("overlaplab/basement/__init__.py", "", "basement"),
    ],
    ids=[
        "upward",
        "upward-for-types",
        "circle-for-types",
        "circle-in-a-lab",
        "to-the-course",
        "capture-to-a-technique",
        "torch",
        "a-room-without-a-floor",
    ],
)
def test_what_breaks_the_order_is_named(
    copy: Path, file: str, line: str, said: str
) -> None:
    path = copy / file
    path.parent.mkdir(exist_ok=True)
    before = path.read_text() if path.exists() else '"""A room."""\n'
    path.write_text(f"{before}\n{line}\n")
    later = copy / "course/overlaplab_course/lab01/later.py"
    later.write_text("import overlaplab_course.lab01.checks\n")

    answer = check(copy)

    assert answer.returncode == 1
    # Names are wrapped and coloured nowhere: the sentence stands on one line.
    assert said in answer.stdout


@pytest.fixture(scope="module")
def loaded() -> tuple[set[str], set[str]]:
    """What notebooks load of labs: all of them but lab 10's, and all."""
    folder = ROOT / "course" / "overlaplab_course"
    labs = sorted(path.name for path in folder.glob("lab[0-9]*"))
    labs.append(labs.pop(labs.index("lab10")))
    seen = "print(*(m for m in sys.modules if m.startswith('overlaplab_course.lab')))"
    lines = [f"import overlaplab_course.{lab}" for lab in labs]
    code = "\n".join(["import sys", *lines[:-1], seen, lines[-1], seen])
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    others, every = ({*line.split()} for line in ran.stdout.splitlines())
    assert {f"overlaplab_course.{lab}" for lab in labs} <= every
    assert {f"overlaplab_course.{lab}" for lab in labs[:-1]} <= others
    return others, every


def test_what_a_notebook_calls_imports_no_grader(
    loaded: tuple[set[str], set[str]],
) -> None:
    assert [name for name in loaded[1] if "check" in name] == []


def test_what_a_notebook_calls_imports_no_solution(
    loaded: tuple[set[str], set[str]],
) -> None:
    """But lab 10, whose every figure runs the lesson's `forward`."""
    assert [name for name in loaded[0] if name.endswith(".reference")] == []
