"""Each wait of ZeRO-3 is needed: with it one thing may be slow, without it values are
wrong, and `virtual` calls it a hazard (tests/techniques/zero/test_waits.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import zero_streams
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def differences() -> Any:
    """By rank and program: to one process, with the wait and without."""
    return run_on_gpus(zero_streams.run_programs)


@pytest.mark.parametrize("name", zero_streams.PROGRAMS)
def test_a_slow_step_ends_where_one_process_ends(name: str, differences: Any) -> None:
    for of_rank in differences:
        assert of_rank[name][0] < zero_streams.RIGHT


@pytest.mark.parametrize("name", zero_streams.PROGRAMS)
def test_without_the_wait_a_slow_step_ends_elsewhere(
    name: str, differences: Any
) -> None:
    for of_rank in differences:
        assert not of_rank[name][1] < zero_streams.WRONG  # NaN is wrong, too
