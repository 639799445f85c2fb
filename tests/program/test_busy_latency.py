"""A collective that finds a kernel running waits for room, once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlaplab.hardware import find_hardware
from overlaplab.program import ProgramBuilder, resolve

CHALK = find_hardware("chalk")  # 1 us a collective, then 0.1 ns a byte
FULL = replace(CHALK, busy_latency_ns=500)


def spans(beside: int, *, rank_of_kernel: int = 0) -> list[tuple[str, int, int, int]]:
    """A kernel of `beside` ns on one rank, and an all-reduce of 10,000 bytes beside."""
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        work = b.collective(rank, "all_reduce", bytes=10_000)
        if rank == rank_of_kernel:
            b.compute(rank, "mm", ns=beside)
        b.wait(rank, work)
        b.compute(rank, "step", ns=10)
    found = resolve(b.build(), FULL).spans
    return [
        (s.name, s.start_ns, s.end_ns, s.attributes.get("latency_ns", 0))
        for s in found
        if s.name == "all_reduce"
    ]


@pytest.mark.parametrize("rank_of_kernel", [0, 1])
def test_a_kernel_on_any_of_its_ranks_keeps_a_collective_waiting(
    rank_of_kernel: int,
) -> None:
    assert (
        spans(5_000, rank_of_kernel=rank_of_kernel)
        == [("all_reduce", 0, 2_500, 1_500)] * 2
    )


def test_one_that_ended_before_the_latency_did_does_not() -> None:
    assert spans(900) == [("all_reduce", 0, 2_000, 1_000)] * 2


def test_room_is_waited_for_once_however_long_kernels_run() -> None:
    assert spans(10**6) == [("all_reduce", 0, 2_500, 1_500)] * 2
