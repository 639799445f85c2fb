"""`ol.profile` on GPUs: what is hidden is seen hidden, in both modes, at no wait."""

from __future__ import annotations

import pytest

from tests.gpu import profile_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)
MODES = pytest.mark.parametrize("events", [False, True], ids=["kineto", "events"])


@MODES
def test_a_collective_beside_a_delay_kernel_is_hidden(events: bool) -> None:
    for found in run_on_gpus(profile_programs.known_overlap, events, True):
        for sent, hidden in zip(
            found["communication_ns"], found["hidden_ns"], strict=True
        ):
            # Between the two delay kernels lies a launch, of some microseconds.
            assert hidden > 0.9 * sent > 0, found


@MODES
def test_a_collective_that_the_stream_waits_for_is_exposed(events: bool) -> None:
    for found in run_on_gpus(profile_programs.known_overlap, events, False):
        for sent, hidden in zip(
            found["communication_ns"], found["hidden_ns"], strict=True
        ):
            assert hidden < 0.1 * sent, found


@MODES
def test_warm_up_is_in_no_step_though_its_kernels_still_ran(events: bool) -> None:
    for found in run_on_gpus(profile_programs.known_overlap, events, True):
        assert found["steps"] == (1, 2)
        assert set(found["labels"]) == {"gradients"}
        assert len(found["labels"]) == profile_programs.STEPS
        for compute_ns in found["compute_ns"]:  # two delays: their clock may be slower
            assert compute_ns > 1.2 * profile_programs.SLEEP_NS
        if not events:
            assert found["num_delays"] == 2 * profile_programs.STEPS, found["remarks"]
            assert any("before the recording began" in r for r in found["remarks"])


def test_events_make_the_cpu_wait_for_nothing() -> None:
    for found in run_on_gpus(profile_programs.events_without_host_wait):
        assert found["ahead"]
        assert found["labels"] == [f"bucket {i}" for i in range(found["buckets"])]
        assert found["bytes"] >= 8 * (512 * 512 + 512) * 4
        assert {"forward", "backward"} <= found["compute"]
        assert found["unseen"] == []


def test_kernels_carry_buckets_and_steps_and_ranks_share_a_clock() -> None:
    first, second = run_on_gpus(profile_programs.kineto_labels)
    for found in (first, second):
        assert found["steps"] == (1, 2)
        assert found["labels"] == {f"bucket {i}" for i in range(found["buckets"])}
        assert found["names"] == {"all_reduce"}
    assert first["ranks"] == [0, 1] and second["ranks"] is None
    assert first["apart_ns"] < 1_000_000  # a kernel ends on both GPUs at almost once


def test_events_say_that_the_cpu_was_late_where_it_was() -> None:
    for remarks in run_on_gpus(profile_programs.late_cpu):
        assert remarks[0].startswith("The CPU was late: 3 of 3"), remarks
    for found in run_on_gpus(profile_programs.known_overlap, True, True):
        assert not any("The CPU was late" in r for r in found["remarks"])


def test_events_keep_what_nccl_still_reads() -> None:
    assert run_on_gpus(profile_programs.dropped_after_launch) == [False, False]


def test_events_cost_less_than_a_small_collective_takes() -> None:
    for found in run_on_gpus(profile_programs.cost_of_events):
        print(found)
        # Two marks, a wait on the side stream and the wrapping around each of two
        # calls; the bound is loose, for machines of slow CPUs, and catches a sync.
        assert found["events_us"] - found["plain_us"] < 300
