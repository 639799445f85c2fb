"""Deadlocks are named: ranks, collectives, numbers, where the orders part."""

import pytest

from overlaplab.errors import DeadlockError
from overlaplab.program import Program, ProgramBuilder, find_deadlock, resolve


def opposite_orders() -> Program:
    b = ProgramBuilder(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        b.compute(rank, "mm", ns=4_000)
        for group in order:
            work = b.collective(rank, "all_reduce", bytes=8, group=group, label=group)
            b.host_wait(rank, [work])
    return b.build()


def test_waiting_for_two_groups_in_opposite_order_is_a_deadlock():
    with pytest.raises(DeadlockError) as caught:
        resolve(opposite_orders(), "chalk")
    assert str(caught.value).splitlines() == [
        "no rank can move at 4.00 us.",
        "  rank 0 waits in all_reduce #0 of process group 'a' (a) for rank 1"
        "   <-- differs",
        "  rank 1 waits in all_reduce #0 of process group 'b' (b) for rank 0"
        "   <-- differs",
        "Their orders part at collective 0 of those that both take part in:",
        "  rank 0: all_reduce #0 of process group 'a' (a)",
        "  rank 1: all_reduce #0 of process group 'b' (b)",
        "Every rank must launch collectives in the same order.",
    ]


def test_a_deadlock_is_found_without_hardware_or_time():
    error = find_deadlock(opposite_orders())
    assert isinstance(error, DeadlockError)
    assert str(error).startswith("no rank can move.\n  rank 0 waits in all_reduce #0")


def test_a_stream_wait_can_be_part_of_the_cycle():
    b = ProgramBuilder(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        for group in order:
            work = b.collective(rank, "all_reduce", bytes=8, group=group)
            b.wait(rank, work)
    assert find_deadlock(b.build()) is not None


def test_a_skipped_all_reduce_names_who_ended():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=8)
    work = b.collective(0, "all_reduce", bytes=8, label="bucket 1", source="a.py:7")
    b.host_wait(0, [work])
    lines = str(find_deadlock(b.build())).splitlines()
    assert lines[1:3] == [
        "  rank 0 waits in all_reduce #1 (bucket 1) for rank 1 [a.py:7]   <-- differs",
        "  rank 1 has ended, after 1 collectives   <-- differs",
    ]
    assert "  rank 1: nothing, its program ends" in lines


def test_a_run_that_stands_is_a_deadlock_only_with_the_ranks_that_wait():
    b = ProgramBuilder(2)
    work = b.collective(0, "all_reduce", bytes=8)
    program = b.build()
    assert find_deadlock(program) is None  # launched; nothing waits for it
    error = find_deadlock(program, waiting={0: work})
    assert "rank 0 waits in all_reduce #0 for rank 1" in str(error)


def test_a_circle_over_three_ranks_of_whom_any_two_agree_is_told_as_such():
    b = ProgramBuilder(3)
    for rank, order in ((0, ("01", "20")), (1, ("12", "01")), (2, ("20", "12"))):
        for pair in order:
            ranks = tuple(sorted(int(r) for r in pair))
            work = b.collective(rank, "barrier", group=pair, ranks=ranks)
            b.host_wait(rank, [work])
    text = str(find_deadlock(b.build()))
    assert "rank 0 waits in barrier #0 of process group '01' for rank 1" in text
    assert "rank 1 waits in barrier #0 of process group '12' for rank 2" in text
    assert "rank 2 waits in barrier #0 of process group '20' for rank 0" in text
    assert "differs" not in text
    assert "three ranks or more" in text


def test_a_program_that_ends_has_no_deadlock():
    b = ProgramBuilder(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        for group in order:
            b.collective(rank, "all_reduce", bytes=8, group=group)
        b.host_wait(rank)
    assert find_deadlock(b.build()) is None
