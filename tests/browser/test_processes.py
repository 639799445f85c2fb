"""The harness: without a browser it says so, and it leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import pytest

from tests.browser.conftest import need_chromium
from tests.browser.jupyter import jupyter
from tests.browser.notebook import chromium
from tests.browser.processes import CHROMIUM, END_TIMEOUT_S, MARK, end_all, marked
from tests.guards import GUARD_S

READY = "everything runs"


def test_without_a_browser_the_test_is_skipped_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(CHROMIUM, raising=False)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium on PATH"):
        need_chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have one"):
        need_chromium()


def test_the_browser_that_the_environment_names_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = tmp_path / "my-browser"
    monkeypatch.setenv(CHROMIUM, str(mine))
    with pytest.raises(ValueError, match="my-browser"):
        need_chromium()
    mine.touch(mode=0o755)
    assert need_chromium() == str(mine)


def test_a_process_that_will_not_end_is_ended() -> None:
    mark = uuid.uuid4().hex
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"{stubborn}; time.sleep(3600)"],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline()

    end_all(mark)

    assert marked(mark) == []
    assert child.poll() is not None
    child.stdout.close()


def run_everything(executable: str, mark: str, folder: Path) -> None:
    """A server with a kernel, and a browser with a page, until somebody ends us."""
    root, home = folder / "root", folder / "home"
    root.mkdir()
    home.mkdir()
    with jupyter(root, home, mark) as server, chromium(executable, mark) as browser:
        request = urllib.request.Request(
            f"{server.url}api/kernels",
            data=b"{}",
            headers={"Authorization": f"token {server.token}"},
        )
        with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
            json.load(answer)
        browser.new_page()
        print(READY, flush=True)
        time.sleep(120)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a parent-death signal")
def test_nothing_survives_a_run_that_is_killed(executable: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.browser.test_processes", executable, mark]
    child = subprocess.Popen(
        [*command, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == READY
        names = {process.name() for process in marked(mark)}
        kernels = [p for p in marked(mark) if "ipykernel_launcher" in p.cmdline()]
        assert len(names) >= 2 and kernels
        child.kill()
        child.wait(END_TIMEOUT_S)
        child.stdout.close()

        deadline = time.monotonic() + GUARD_S
        while (left := marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []
    finally:
        child.kill()
        end_all(mark)


if __name__ == "__main__":
    run_everything(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
