"""One JupyterLab and one browser for all tests of this folder, and their end."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.jupyter import Jupyter, jupyter
from tests.browser.notebook import chromium
from tests.browser.processes import CHROMIUM, find_chromium, marked

LABS = Path(__file__).parents[2] / "labs"


def need_chromium() -> str:
    """The browser; without one the test is skipped, and in CI it fails."""
    found = find_chromium()
    if found is not None:
        return found
    why = f"no Chromium on PATH, and {CHROMIUM} does not name one"
    if os.environ.get("CI"):
        pytest.fail(f"{why}; CI must have one", pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def executable() -> str:
    return need_chromium()


@pytest.fixture(scope="session")
def mark() -> Iterator[str]:
    """What the processes of this run carry; none of them may outlive it."""
    mark = uuid.uuid4().hex
    yield mark
    assert marked(mark) == []


@pytest.fixture(scope="session")
def server(
    executable: str, mark: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jupyter]:
    """JupyterLab over a copy of labs/."""
    folder = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(LABS, folder / "labs")
    (folder / "home").mkdir()
    with jupyter(folder / "labs", folder / "home", mark) as started:
        yield started


@pytest.fixture(scope="session")
def browser(executable: str, mark: str) -> Iterator[Browser]:
    with chromium(executable, mark) as started:
        yield started
