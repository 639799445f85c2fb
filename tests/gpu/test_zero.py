"""ZeRO-3 on GPUs trains as one process on all the data, in time with prefetch."""

from __future__ import annotations

import pytest

from tests.gpu import zero_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_twenty_adamw_steps_end_where_one_process_ends(prefetch: int) -> None:
    for found in run_on_gpus(zero_programs.all_nets_as_alone, prefetch):
        # Sums in another order; AdamW makes small gradients large.
        assert {name: worst for name, worst in found.items() if worst > 1e-4} == {}


def test_a_step_on_gpus_never_waits_for_the_cpu() -> None:
    assert run_on_gpus(zero_programs.steps_without_sync) == ["no sync"] * 2
