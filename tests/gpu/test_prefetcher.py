"""Each wait of the prefetcher is needed: without it values are wrong, and `virtual`
calls it a hazard (tests/techniques/double_buffer/test_waits.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import prefetcher_programs as programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(1)


def on_one(fn: Any) -> Any:
    return run_on_gpus(fn, world_size=1)[0]


@pytest.fixture(scope="module")
def values() -> Any:
    """By program: what it gives with the wait, and without."""
    return on_one(programs.run_pairs)


@pytest.mark.parametrize("name", programs.PAIRS)
def test_batches_are_right_whatever_is_late(name: str, values: Any) -> None:
    assert values[name][0] == programs.PAIRS[name][1]


@pytest.mark.parametrize("name", programs.PAIRS)
def test_without_the_wait_values_are_wrong(name: str, values: Any) -> None:
    assert values[name][1] != programs.PAIRS[name][1]


def test_the_cpu_waits_for_no_copy_in_a_loop_that_reads_its_loss() -> None:
    held = on_one(programs.waits_of_the_cpu)
    assert len(held) >= programs.NUM_BATCHES and not any(held)


def test_the_gpu_has_work_when_a_batch_is_handed_out() -> None:
    assert on_one(programs.idle_moments) == []


def test_a_loop_that_is_left_does_not_wait_for_the_gpu() -> None:
    assert not on_one(programs.leaving_holds_the_cpu)


def test_no_thread_and_no_memory_is_left() -> None:
    assert on_one(programs.pinned_in_use) > 0
    assert on_one(programs.left_behind) == {"threads": 0, "pinned": 0, "device": 0}


def test_a_copy_that_is_shorter_than_the_step_is_hidden() -> None:
    found = on_one(programs.exposed_copy)
    print(found)
    assert found["copies"] < found["there"]
    # 2 %, and what the first copy of 20 costs, which has no step beside it.
    assert found["fed"] < 1.02 * found["there"] + found["copies"] / 20


def test_odd_tensors_arrive_as_with_to() -> None:
    assert on_one(programs.differences_of_odd_tensors) == {}


def test_what_moves_itself_is_right() -> None:
    assert on_one(programs.kinds_that_move_themselves) == [
        [[1.0, 0.0], [0.0, 1.0]],
        [1.0, 1.0, 1.0],
        [1.0, 1.0],
        [1.0, 0.0, 1.0],
    ]


def test_random_loaders_give_what_they_give_without_a_prefetcher() -> None:
    run_on_gpus(programs.random_loaders, 1000, world_size=1)


def test_batches_of_workers_that_pin_are_the_same() -> None:
    plain, fed = on_one(programs.batches_of_workers)
    assert fed == plain


@pytest.mark.gpu(2)
def test_batches_go_to_a_gpu_that_is_not_the_current_one() -> None:
    found = on_one(programs.batches_of_another_device)
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
