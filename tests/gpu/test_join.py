"""Uneven data on GPUs: a late wait for who goes on would show in the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.processes import run_on_gpus
from tests.techniques.data_parallel import uneven

pytestmark = pytest.mark.gpu(2)

CASES: list[tuple[tuple[int, int], str, int, bool]] = [
    ((3, 2), "buckets", 1, True),
    ((2, 5), "buckets", 2, False),
    ((0, 2), "buckets", 1, False),
    ((1, 3), "one in flight", 2, False),
    ((3, 1), "bfloat16 wire", 1, False),
    ((1, 3), "serial", 2, True),
]


def assert_states(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_every_rank_ends_with_the_parameters_and_buffers_of_the_last() -> None:
    for results in run_on_gpus(uneven.train_all, CASES):
        for (state, steps), (numbers, kind, size, by_initial) in zip(
            results, CASES, strict=True
        ):
            want, num_steps = uneven.expected(numbers, size, by_initial)
            assert steps == num_steps
            assert_states(state, want, 2e-2 if kind == "bfloat16 wire" else 1e-4)


def test_ended_ranks_update_with_the_others_averages() -> None:
    numbers = (1, 3)
    want, _ = uneven.expected(numbers, make_optimizer=uneven.adamw, num_epochs=2)
    for state in run_on_gpus(uneven.epochs_with_adamw, numbers, True):
        assert_states(state, want, 1e-3)
    want, _ = uneven.expected(numbers, make_optimizer=uneven.adamw)
    for state in run_on_gpus(uneven.with_a_sharded_optimizer, numbers):
        assert_states(state, want, 1e-3)
