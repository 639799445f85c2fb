"""The prefetcher and the backward of lab 10 run unchanged on GPUs."""

from __future__ import annotations

import pytest

from tests.gpu import lab10_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_step_is_that_of_one_process(depth: int) -> None:
    # Sums of a few thousand products in float32, in another order than the CPU's.
    assert max(run_on_gpus(lab10_programs.worst_of_a_step, depth)) < 1e-4
