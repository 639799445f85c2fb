"""The wheel that people install: what is in it, and what it does far from a checkout.

`make test-wheel` builds it and names it in OVERLAPLAB_WHEEL.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("OVERLAPLAB_WHEEL")
MOST_IMPORT_CPU_S = 0.3

pytestmark = [
    pytest.mark.skipif(not WHEEL, reason="no wheel was built: make test-wheel does it"),
    pytest.mark.timeout(600),
]
IMPORT = """
import time
begin = time.process_time()
import overlaplab
print(time.process_time() - begin, overlaplab.__file__)
"""


def names() -> list[str]:
    assert WHEEL is not None
    with zipfile.ZipFile(WHEEL) as wheel:
        return wheel.namelist()


def test_it_holds_the_package_and_the_courses_code_and_nothing_else() -> None:
    top = {name.split("/")[0] for name in names()}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "overlaplab",
        "overlaplab_course",
    }
    assert len(top) == 3


def test_it_has_no_results_of_benchmarks_and_no_traces_but_a_lessons_own() -> None:
    assert [name for name in names() if "/results/" in name] == []
    traces = [name for name in names() if name.endswith(".gz")]
    assert {name.rpartition("/")[0] for name in traces} == {
        "overlaplab_course/lab02/traces"
    }
    json_folders = {
        name.rpartition("/")[0]
        for name in names()
        if name.startswith("overlaplab/") and name.endswith(".json")
    }
    assert json_folders <= {"overlaplab/hardware/machines"}


def test_it_has_the_lessons_whose_cells_the_labs_run() -> None:
    carried = {Path(name).name for name in names() if "/lessons/" in name}
    assert carried == {path.name for path in (ROOT / "course").glob("[0-9][0-9]_*.py")}


class Installed:
    """The wheel in an environment of its own, far from the repository.

    What it depends on (torch has a gigabyte) is that of the interpreter that tests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "somewhere"
        self.folder.mkdir()
        home = folder / "environment"
        command = [sys.executable, "-m", "venv", "--without-pip", str(home)]
        subprocess.run(command, check=True)
        self.python = home / "bin" / "python"
        self.program = home / "bin" / "overlaplab"
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
        subprocess.run([*pip, "-q", "--no-deps", "--no-index", str(WHEEL)], check=True)
        (self.packages,) = home.glob("lib/python*/site-packages")
        dependencies = Path(numpy.__file__).parents[1]
        (self.packages / "dependencies.pth").write_text(f"{dependencies}\n")

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_no_other_module_appears_in_an_environment(installed: Installed) -> None:
    found = {path.name for path in installed.packages.iterdir()}
    found = {name for name in found if not name.endswith(".dist-info")}
    assert found == {"overlaplab", "overlaplab_course", "dependencies.pth"}


def test_importing_it_costs_no_time(installed: Installed) -> None:
    runs = [installed.run(installed.python, "-c", IMPORT).stdout for _ in range(2)]
    seconds, where = runs[1].split()
    assert Path(where).is_relative_to(installed.packages)
    assert float(seconds) < MOST_IMPORT_CPU_S


def test_the_demo_runs(installed: Installed) -> None:
    done = installed.run(installed.program, "demo", "--ranks", "2", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "All 3 variants end with the same parameters" in done.stdout
    assert (installed.folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_reported(installed: Installed) -> None:
    trace = ROOT / "tests" / "traces" / "h200" / "serial-b8-rank0.json.gz"
    shutil.copy(trace, installed.folder)
    done = installed.run(installed.program, "report", trace.name, "--html", "r.html")
    assert done.returncode == 0, done.stderr
    assert "launched-late" in done.stdout
    assert "<title>Overlap report" in (installed.folder / "r.html").read_text()


def test_the_doctor_answers(installed: Installed) -> None:
    done = installed.run(installed.program, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_the_solution_of_a_lab_gets_full_marks(installed: Installed) -> None:
    notebook = ROOT / "solutions" / "01_overlap_arithmetic.ipynb"
    shutil.copy(notebook, installed.folder)
    done = installed.run(installed.program, "grade", notebook.name)
    assert done.returncode == 0, done.stdout + done.stderr
