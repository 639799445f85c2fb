"""Processes that leave nothing behind: each carries a mark, and ends with its parent.

A browser and a Jupyter server start processes of their own, in sessions of their own.
All inherit an environment variable; whoever has it belongs to the run.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK = "OVERLAPLAB_BROWSER_RUN"
CHROMIUM = "OVERLAPLAB_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
END_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1


def find_chromium(environ: Mapping[str, str] | None = None) -> str | None:
    """The browser to test with: the one that the environment names, or one on PATH.

    Raises:
        ValueError: the environment names one that cannot be run.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(CHROMIUM)
    if named:
        if not os.access(named, os.X_OK):
            raise ValueError(
                f"{CHROMIUM}={named!r} is no program that can be run; expected the "
                "path of Chromium or Chrome"
            )
        return named
    found = (shutil.which(name, path=environ.get("PATH")) for name in NAMES)
    return next((path for path in found if path), None)


def start(
    command: Sequence[str], mark: str, environ: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a process that carries the mark and dies with this one (on Linux)."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            env={**environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def marked(mark: str) -> list[psutil.Process]:
    """The processes of a run that are alive, this one aside."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):  # of another user, or gone meanwhile
            continue
    return [process for process in found if process.pid != os.getpid()]


def end_all(mark: str) -> None:
    """End every process of a run: first politely, then not."""
    for signal_it in (psutil.Process.terminate, psutil.Process.kill):
        alive = marked(mark)
        for process in alive:
            try:
                signal_it(process)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=END_TIMEOUT_S)
