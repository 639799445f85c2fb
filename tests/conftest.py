"""What every test runs under: where GPUs are absent, and how hypothesis searches."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu(num)` tests where fewer than `num` CUDA devices are visible."""
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
