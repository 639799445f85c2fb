"""A step captured in a CUDA graph is the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "program", [programs.trained_transformer, programs.accumulated_transformer]
)
def test_eight_captured_steps_end_where_eight_eager_ones_do(
    program: Callable[..., Any], set_to_none: bool
) -> None:
    eager = run_on_gpus(program, False, set_to_none)
    captured = run_on_gpus(program, True, set_to_none)
    for ours, theirs in zip(eager, captured, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(captured[0], captured[1], strict=True):
        assert torch.equal(a, b)


def test_a_step_that_cannot_be_captured_is_refused_with_the_reason() -> None:
    reasons = {
        "plain": "captured",
        "item": "wait for the GPU",
        "shape": "(32, 512)",
        "accumulates": "overwritten, not accumulated",
        "replaced": "set_to_none=False",
    }
    for found in run_on_gpus(programs.refusals):
        wrong = {k: found[k] for k, text in reasons.items() if text not in found[k]}
        assert not wrong
        assert "programs.py" in found["item"]  # where it waits
