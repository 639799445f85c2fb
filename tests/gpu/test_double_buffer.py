"""Late gradients and second weights on GPUs: values, and who waits for whom.

Each wait is needed: without it values are wrong, and `virtual` calls it a hazard
(tests/techniques/double_buffer/test_stream_waits.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import double_buffer_programs as programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


def test_ranks_train_as_one_process_whose_gradients_are_one_step_late() -> None:
    for of_rank in run_on_gpus(programs.late_as_one_process):
        for (net, set_to_none), difference in of_rank.items():
            # bfloat16 keeps 8 bits; else sums in another order, through AdamW.
            tolerance = 2e-2 if net == "mixed_dtypes" else 1e-4
            assert difference < tolerance, (net, set_to_none)


@pytest.fixture(scope="module")
def differences() -> Any:
    """By rank and program: to what is right, with the wait and without."""
    return run_on_gpus(programs.run_programs)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_what_is_slow_is_waited_for(name: str, differences: Any) -> None:
    for of_rank in differences:
        assert of_rank[name][0] < programs.RIGHT


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_without_the_wait_values_are_wrong(name: str, differences: Any) -> None:
    for of_rank in differences:
        assert not of_rank[name][1] < programs.WRONG  # NaN is wrong, too


def test_a_forward_does_not_wait_for_the_messages_of_the_step_before_it() -> None:
    for held_up in run_on_gpus(programs.forwards_that_are_held_up):
        assert held_up == [False] * 3


def test_a_steady_step_and_a_swap_never_make_the_cpu_wait() -> None:
    for found in run_on_gpus(programs.waits_of_the_cpu):
        assert found == dict.fromkeys(found, "") and len(found) == 3


def test_the_cpu_runs_ahead_of_messages() -> None:
    assert run_on_gpus(programs.steps_ahead) == [True, True]


def test_a_step_is_not_captured_and_goes_on_without() -> None:
    for says, has_gradients in run_on_gpus(programs.captured):
        assert "cannot be captured in a CUDA graph" in says
        assert "BucketedReducer" in says
        assert has_gradients == [False, True]
