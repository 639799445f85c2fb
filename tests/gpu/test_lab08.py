"""The prefetcher, the slots and the late reducer of lab 08 run unchanged on GPUs."""

from __future__ import annotations

import pytest

from overlaplab_course.lab08 import late
from tests.gpu import lab08_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("way", ["prefetch", "double_buffered"])
def test_every_step_gets_its_batch_and_keeps_it(way: str) -> None:
    assert run_on_gpus(lab08_programs.wrong_batches, way) == [[], []]


@pytest.mark.parametrize(
    "case", [c for c in late.CASES if c.num_ranks == 2], ids=lambda c: c.name
)
def test_late_gradients_are_those_of_one_process(case: late.Case) -> None:
    # Float32 on two devices, after a few steps with a learning rate of 0.05.
    assert max(run_on_gpus(lab08_programs.worst_of_late, case)) < 1e-5
