"""Streams and lifetimes on NCCL, with delay kernels that make every race visible."""

from __future__ import annotations

import pytest

from tests.gpu import programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)
FP32 = 1e-5  # relative, per tensor: the order of a sum over 64 rows


@pytest.mark.parametrize("side", [False, True], ids=["one stream", "side stream"])
@pytest.mark.parametrize("bucket_mib", [0.5, 25.0])
def test_averages_are_right_though_every_backward_kernel_is_late(
    bucket_mib: float, side: bool
) -> None:
    for worst in run_on_gpus(programs.delayed_backward, bucket_mib, side):
        assert worst < FP32


def test_a_bucket_waits_for_every_stream_that_wrote_into_it() -> None:
    for worst in run_on_gpus(programs.two_streams):
        assert worst < FP32


def test_gradients_dropped_after_wait_are_not_overwritten_by_their_allocator() -> None:
    assert run_on_gpus(programs.dropped_after_wait) == [True, True]


def test_a_cap_with_another_dtype_on_the_wire_keeps_the_averages_right() -> None:
    for worst in run_on_gpus(programs.reduce_dtype_on_side_stream):
        assert worst < FP32


def test_no_hook_makes_the_cpu_wait() -> None:
    assert run_on_gpus(programs.hooks_without_sync) == ["no sync", "no sync"]


def test_the_first_all_reduce_starts_before_the_backward_ends() -> None:
    for found in run_on_gpus(programs.overlap_in_kernels):
        assert found["first_communication_ms"] < found["last_compute_end_ms"]
        assert found["hidden_ms"] > 0
