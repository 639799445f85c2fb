"""What GPUs do without a wait is what the virtual cluster calls a hazard.

Each program runs twice on two GPUs, with and without one wait, and on `virtual`.
"""

from __future__ import annotations

from typing import Any

import pytest

import overlaplab as ol
from tests.gpu import copy_programs, stream_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


def hazards(fn: Any, *args: Any) -> list[str]:
    """What `virtual` reports, of the same program."""
    found = ol.run(fn, *args, world_size=2, cluster="virtual").warnings
    return [finding.kind for finding in found]


@pytest.fixture(scope="module")
def values() -> Any:
    """By rank and program: what it gives with the wait, and without."""
    return run_on_gpus(stream_programs.run_pairs)


@pytest.mark.parametrize("name", stream_programs.PAIRS)
def test_a_missing_wait_gives_wrong_values_and_a_hazard(name: str, values: Any) -> None:
    program, right = stream_programs.PAIRS[name]
    assert [of_rank[name][0] for of_rank in values] == [right, right]
    assert values[0][name][1] != right
    assert "hazard" in hazards(program, False)
    assert hazards(program, True) == []


def test_a_blocking_all_reduce_runs_on_the_stream_that_computes() -> None:
    """As virtual draws it: tests/cluster/test_virtual_blocking.py."""
    for found in run_on_gpus(stream_programs.streams_of_messages):
        assert found == {"blocking": True, "async_op": False}


def test_a_block_dropped_on_a_side_stream_is_overwritten_by_its_owner() -> None:
    found = run_on_gpus(stream_programs.run_keeps)
    assert found[0][""][1], "the block was not handed out again: nothing is shown"
    assert found[0][""][0] != 3.0
    for of_rank in found:
        assert of_rank["record_stream"] == (3.0, False)
        assert of_rank["wait"] == (3.0, True)


def test_virtual_calls_the_reuse_of_a_dropped_block_a_hazard() -> None:
    program = stream_programs.dropped_under_a_side_stream
    assert "hazard" in hazards(program, "")
    assert hazards(program, "record_stream") == []
    assert hazards(program, "wait") == []


def test_only_copies_of_pinned_memory_leave_the_cpu_free() -> None:
    assert run_on_gpus(copy_programs.blocked_by_copies, world_size=1) == [
        {
            "to device, pageable": True,
            "to device, pinned": False,
            "to host, pageable": True,
            "to host, pinned": False,
            "to host, pinned by to()": False,
            "cpu()": True,
        }
    ]


def test_a_pinned_buffer_refilled_too_early_reaches_the_device() -> None:
    assert run_on_gpus(copy_programs.refilled_pinned_buffer, False, world_size=1) == [
        -1.0
    ]
    assert run_on_gpus(copy_programs.refilled_pinned_buffer, True, world_size=1) == [
        1.0
    ]


def test_copies_in_opposite_directions_overlap() -> None:
    (found,) = run_on_gpus(copy_programs.copies_in_both_directions, world_size=1)
    print(found)
    # Two engines and a full-duplex link: the sum would be one after the other.
    assert found["at once"] < 0.9 * (found["down"] + found["up"])
