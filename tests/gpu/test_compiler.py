"""A model that our compiler trains data parallel, over NCCL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import compiler_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("delay", [False, True], ids=["as it comes", "a slow rank"])
def test_gradients_are_those_of_one_process(delay: bool, lowering: str) -> None:
    program = compiler_programs.gradients_of_a_compiled_chain
    for worst in run_on_gpus(program, delay, lowering):
        assert worst < 1e-3  # TF32 is off; sums over ranks in another order


@pytest.mark.parametrize("delay", [False, True], ids=["as it comes", "a slow rank"])
def test_rows_of_a_table_are_summed_to_one_processs_gradient(delay: bool) -> None:
    for *errors, apart in run_on_gpus(compiler_programs.gradients_of_a_table, delay):
        assert max(errors) < 1e-3
        assert apart == 0  # all ranks sum the same rows in the same order


def test_inductor_keeps_our_order() -> None:
    for written in run_on_gpus(compiler_programs.what_inductor_wrote):
        assert written.count("send") > 1
        sent = written.index("send")
        # Computing stands between the first message and its wait.
        assert "mm" in written[sent : written.index("wait")], written


@pytest.fixture(scope="module")
def differences() -> Any:
    """By rank and edge: errors with it, and without."""
    return run_on_gpus(compiler_programs.differences)


@pytest.mark.parametrize("edge", compiler_programs.CUTS)
def test_code_on_two_streams_waits_for_what_is_late(
    edge: str, differences: Any
) -> None:
    for of_rank in differences:
        assert of_rank[edge][0] == 0


@pytest.mark.parametrize("edge", compiler_programs.CUTS)
def test_without_the_edge_a_value_is_wrong(edge: str, differences: Any) -> None:
    for of_rank in differences:
        assert not of_rank[edge][1] < 1e-2  # NaN is wrong, too
