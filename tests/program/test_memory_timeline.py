"""A rank's memory in the time of its timeline."""

from dataclasses import replace

import pytest
import torch

import overlaplab as ol
from overlaplab.hardware import find_hardware
from overlaplab.program import ProgramBuilder, peak_bytes, resolve
from overlaplab.timeline import Memory


def program():
    b = ProgramBuilder(1)
    b.storage(0, bytes=100, name="weight")
    first = b.storage(0, bytes=7, name="activation 0")
    b.compute(0, "mm", ns=1_000)
    second = b.storage(0, bytes=30, name="activation 1")
    b.compute(0, "mm", ns=2_000)
    b.free(0, second)
    b.storage(0, bytes=20, name="gradient")
    b.compute(0, "backward", ns=4_000)
    b.free(0, first)
    return b.build()


def test_each_step_stands_where_the_device_comes_to_it():
    (memory,) = resolve(program(), "chalk").memory
    assert memory.steps == ((0, 107), (1_000, 137), (3_000, 127), (7_000, 120))
    assert (memory.rank, memory.peak_bytes, memory.peak_ns) == (0, 137, 1_000)
    assert memory.holders[:2] == (("weight", 100), ("activation 1", 30))


def test_a_slower_machine_moves_the_steps_and_not_the_bytes():
    launching = replace(find_hardware("chalk"), launch_ns=15_000)
    slow = resolve(program(), launching).memory[0]
    fast = resolve(program(), "chalk").memory[0]
    assert [size for _, size in slow.steps] == [size for _, size in fast.steps]
    assert slow.peak_ns > fast.peak_ns


def test_what_is_held_for_no_time_still_counts_for_the_peak():
    b = ProgramBuilder(1)
    for _ in range(2):
        held = b.storage(0, bytes=50)
        b.compute(0, "view", ns=0)
        b.free(0, held)
    b.compute(0, "mm", ns=10)
    memory = resolve(b.build(), "chalk").memory[0]
    assert memory.peak_bytes == 50 == peak_bytes(b.build())


def test_a_real_step_begins_and_ends_with_less_than_its_peak():
    def step():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        with ol.annotate("step"):
            model(torch.ones(512, 64)).sum().backward()

    timeline = ol.run(step, world_size=2, hardware="chalk").timeline
    for memory in timeline.memory:
        first, last = memory.steps[0][1], memory.steps[-1][1]
        assert max(first, last) < memory.peak_bytes
        assert len(memory.steps) > 20
    assert [memory.rank for memory in timeline.memory] == [0, 1]
    assert timeline.of_rank(1).memory == (timeline.memory[1],)


def test_memory_survives_a_trace_file(tmp_path):
    timeline = resolve(program(), "chalk")
    assert timeline.from_chrome(timeline.to_chrome(tmp_path / "t.json")) == timeline


def test_a_program_without_storages_has_no_memory():
    b = ProgramBuilder(1)
    b.compute(0, "mm", ns=1)
    assert resolve(b.build(), "chalk").memory == ()
    assert Memory(0, ()).peak_bytes == 0 == Memory(0, ()).peak_ns


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"no rank 9 in this timeline; it has \[0\]"):
        resolve(program(), "chalk").of_rank(9)


def test_a_gpu_allocates_in_blocks_and_cublas_takes_a_workspace_a_stream():
    b = ProgramBuilder(1)
    b.storage(0, bytes=100, name="weight")
    b.compute(0, "attention", flops=10**6)
    b.compute(0, "mm", flops=10**6)
    b.compute(0, "mm", flops=10**6)
    b.compute(0, "mm", stream="side", flops=10**6)
    hw = replace(find_hardware("chalk"), allocation_bytes=512, workspace_bytes=1000)
    (memory,) = resolve(b.build(), hw).memory
    kinds = dict(memory.kinds)
    assert set(kinds["other"]) == {512}
    assert list(dict.fromkeys(kinds["workspaces"])) == [0, 1000, 2000]
    assert memory.holders[0] == ("cuBLAS workspace", 1000)
    assert peak_bytes(b.build()) == 100  # what the program asked for
