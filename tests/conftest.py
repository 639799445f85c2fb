"""What every test runs under: where GPUs are absent, and how hypothesis searches."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from overlaplab.grading.children import Judge

# The same examples every time: a failure in CI is one that anybody can repeat.
settings.register_profile(
    "overlaplab", deadline=None, derandomize=True, database=None, print_blob=True
)
settings.load_profile("overlaplab")


def pytest_configure() -> None:
    """Interrupts work, also where a shell has started this with SIGINT ignored.

    As `nohup make test &` does; what the tests start would inherit it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _place_in_line(file: Path) -> int:
    """Files that start processes go first, labs next: no worker ends on a long one."""
    source = file.read_text("utf-8")
    if any(word in source for word in ("gloo", "subprocess", "Notebook")):
        return 0
    return 1 if "labs" in file.parts else 2


def pytest_collection_finish() -> None:
    """What is loaded stays: looking through it at each collection cost 6 % of CI."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; skip `gpu(num)` where fewer CUDA devices are visible."""
    items.sort(key=lambda item: _place_in_line(item.path))
    marked = [(item, item.get_closest_marker("gpu")) for item in items]
    if not any(mark for _, mark in marked):
        return
    import torch

    found = torch.cuda.device_count()
    for item, mark in marked:
        if mark is None:
            continue
        needed = mark.kwargs.get("num", mark.args[0] if mark.args else 1)
        if found < needed:
            reason = f"needs {needed} CUDA device(s), found {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    """One for all files: to start one takes seconds. It replaces what tests kill."""
    from overlaplab.grading.children import Judge

    with Judge(["tests.grading.lab97", "tests.grading.lab98"]) as running:
        yield running
