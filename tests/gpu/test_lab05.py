"""The reducers of lab 05 and its five repairs average on GPUs as in the lab."""

from __future__ import annotations

import pytest

from overlaplab_course.lab05.repairs import KINDS
from tests.gpu import lab05_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("name", ["PromptReducer", "OrderedReducer", *KINDS])
def test_gradients_are_those_of_one_process(name: str) -> None:
    # Sums of a few thousand products in float32, in another order than the CPU's.
    assert max(run_on_gpus(lab05_programs.worst_gradient, name)) < 1e-4
