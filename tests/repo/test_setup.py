"""The two commands' set-up: what it refuses, and when it starts again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guards import GUARD_S

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that set-up reads, and an interpreter that only pretends.

    `python` says that pip and venv are there and makes .venv/bin/python a copy of
    itself; it writes down what pip is asked to install.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    script(
        tmp_path / "python",
        'if [ "$2" = venv ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; fi\n'
        'if [ "$2" = pip ]; then echo "$@" >> installs; [ ! -e broken ] || exit 1; fi\n'
        'case "$2" in *"import pip"*) test -x .venv/bin/python;; esac\n',
    )
    return tmp_path


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)


def setup(
    folder: Path, python: str = "./python", goal: str = "setup"
) -> subprocess.CompletedProcess[str]:
    """`make setup`, without the variables of a make that runs this test."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", goal, f"PYTHON={python}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )


def installs(folder: Path) -> list[str]:
    path = folder / "installs"
    return path.read_text().splitlines() if path.exists() else []


def test_set_up_installs_once_with_the_constraints(checkout: Path) -> None:
    assert setup(checkout).returncode == 0
    assert setup(checkout).returncode == 0

    (install,) = installs(checkout)
    assert "--constraint constraints.txt" in install
    assert install.endswith("--editable .[course,dev]")


def test_an_interrupted_install_starts_again(checkout: Path) -> None:
    (checkout / "broken").touch()
    assert setup(checkout).returncode != 0
    (checkout / "broken").unlink()

    assert setup(checkout).returncode == 0
    assert len(installs(checkout)) == 2


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_versions_are_installed(checkout: Path, name: str) -> None:
    setup(checkout)
    later = (checkout / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(checkout / name, (later, later))

    assert setup(checkout).returncode == 0
    assert len(installs(checkout)) == 2


def test_what_is_imported_once_is_compiled_once(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    setup(checkout)
    script(checkout / ".venv" / "bin" / "python", "env > seen\n")

    assert setup(checkout, goal="test-drift").returncode == 0
    seen = (checkout / "seen").read_text()
    assert "OMP_NUM_THREADS=1" in seen and "DONTWRITEBYTECODE" not in seen


def test_a_python_that_is_missing_or_too_old_is_named(checkout: Path) -> None:
    script(checkout / "old", 'case "$2" in *version_info*) exit 1;; esac\n')

    for python in ("no-such-python", "./old"):
        result = setup(checkout, python)
        assert result.returncode != 0
        assert "needs Python 3.11 or later" in result.stderr
        assert python in result.stderr
    assert installs(checkout) == []


def test_a_python_without_venv_says_what_to_install(checkout: Path) -> None:
    script(checkout / "bare", 'case "$2" in *ensurepip*) exit 1;; esac\n')

    result = setup(checkout, "./bare")

    assert result.returncode != 0
    assert "lacks the standard modules venv and ensurepip" in result.stderr
    assert "python3-venv" in result.stderr


@pytest.fixture
def ci(checkout: Path) -> Callable[..., list[str]]:
    """Runs .ci/run with nothing but some programs that only say what they were asked;
    returns what they said."""
    (checkout / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    programs = checkout / "bin"
    programs.mkdir()
    for name in ("bash", "sh", "dirname", "env"):
        (programs / name).symlink_to(str(shutil.which(name)))
    script(programs / "id", "echo 0")
    script(programs / "make", 'echo "$PWD: make $@, CI=$CI"')

    def run(**stubs: str) -> list[str]:
        for name, body in stubs.items():
            script(programs / name.replace("_", "-"), body)
        result = subprocess.run(
            [checkout / ".ci" / "run"],
            cwd="/",
            env={"PATH": str(programs)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=GUARD_S,
        )
        return result.stdout.splitlines()

    return run


def test_ci_runs_make_test_and_the_wheel_in_the_checkout_wherever_it_is_called(
    checkout: Path, ci: Callable[..., list[str]]
) -> None:
    assert ci(chromium="") == [f"{checkout}: make test test-wheel, CI=true"]


def test_ci_installs_a_browser_where_there_is_none(
    checkout: Path, ci: Callable[..., list[str]]
) -> None:
    *installed, made = ci(apt_get='echo "apt-get $@" >&2')
    assert [line.split()[-1] for line in installed] == ["update", "fonts-dejavu-core"]
    assert " install --yes " in installed[1] and " chromium " in installed[1]
    assert made == f"{checkout}: make test test-wheel, CI=true"


def test_ci_stops_where_the_browser_cannot_be_installed(
    ci: Callable[..., list[str]],
) -> None:
    assert ci(apt_get='echo "no network" >&2; exit 100') == ["no network"]
