"""A collective that finds kernels running is sent where those end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlaplab.hardware import find_hardware
from overlaplab.program import ProgramBuilder, resolve

# 1 us a collective, then 0.1 ns a byte.
FULL = replace(find_hardware("chalk"), waits_for_room=True)


def spans(
    *kernels: int, rank_of_kernels: int = 0, hardware=FULL
) -> list[tuple[str, int, int, int]]:
    """Kernels of so many ns on one rank, and an all-reduce of 10,000 bytes beside."""
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000)
    for ns in kernels:
        b.compute(rank_of_kernels, "mm", ns=ns)
    found = resolve(b.build(), hardware).spans
    return [
        (s.name, s.start_ns, s.end_ns, s.attributes.get("latency_ns", 0))
        for s in found
        if s.name == "all_reduce"
    ]


@pytest.mark.parametrize("rank_of_kernels", [0, 1])
def test_a_kernel_on_any_of_its_ranks_keeps_a_collective_waiting(
    rank_of_kernels: int,
) -> None:
    assert (
        spans(5_000, rank_of_kernels=rank_of_kernels)
        == [("all_reduce", 0, 6_000, 5_000)] * 2
    )


def test_one_that_ended_before_the_latency_did_does_not() -> None:
    assert spans(900) == [("all_reduce", 0, 2_000, 1_000)] * 2


def test_the_next_kernel_does_not_hold_it_up_again() -> None:
    assert spans(1_500, 9_000) == [("all_reduce", 0, 2_500, 1_500)] * 2


def test_a_profile_without_the_key_waits_for_nothing() -> None:
    chalk = find_hardware("chalk")
    assert spans(5_000, hardware=chalk) == [("all_reduce", 0, 2_000, 1_000)] * 2


def test_it_is_sent_when_the_last_of_several_ranks_kernels_has_ended() -> None:
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000)
        b.compute(rank, "mm", ns=4_000 + 2_000 * rank)
        b.compute(rank, "mm", ns=7_000, stream="side")
    found = resolve(b.build(), FULL).spans
    # Rank 1 shares its GPU: 6000 and 7000, the second alone for its last 1000.
    assert {s.end_ns for s in found if s.name == "all_reduce"} == {14_000}


def test_while_it_waits_nothing_is_slowed() -> None:
    slowed = replace(FULL, compute_rate_permille=500, wire_rate_permille=500)
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000)
        b.compute(rank, "first", ns=5_000)
        b.compute(rank, "second", ns=500)
    ends = {s.name: s.end_ns for s in resolve(b.build(), slowed).spans}
    # 500 of the wire beside the second, which takes twice as long; then 500 alone.
    assert ends == {"first": 5_000, "second": 6_000, "all_reduce": 6_500}
