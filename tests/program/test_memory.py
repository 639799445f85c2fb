"""Live bytes, the peak and what is left at the end."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.program import (
    Program,
    ProgramBuilder,
    StorageLife,
    end_bytes,
    held_at_peak,
    live_bytes,
    peak_bytes,
    top_holders,
)


def activations() -> Program:
    b = ProgramBuilder(1)
    b.storage(0, bytes=100, name="weight")
    first = b.storage(0, bytes=7, name="activation 0")
    b.compute(0, "mm", ns=1)
    second = b.storage(0, bytes=30, name="activation 1")
    b.compute(0, "mm", ns=1)
    b.free(0, second)
    b.storage(0, bytes=20, name="gradient")
    b.compute(0, "backward", ns=1)
    b.free(0, first)
    return b.build()


def test_live_bytes_are_a_list_of_steps():
    assert live_bytes(activations()) == [(0, 107), (1, 137), (2, 127), (3, 120)]


def test_the_peak_and_the_end():
    assert peak_bytes(activations()) == 137
    assert end_bytes(activations()) == 120


def test_the_peak_is_held_by_these_largest_first():
    names = [life.name for life in held_at_peak(activations())]
    assert names == ["weight", "activation 1", "activation 0"]


def test_the_top_holders_say_their_name_or_who_made_them_and_where():
    b = ProgramBuilder(1)
    made = b.storage(0, bytes=30)
    b.storage(0, bytes=100, name="weight")
    b.storage(0, bytes=20)
    b.storage(0, bytes=10)
    b.compute(0, "mm", writes=(made,), source="net.py:7 in forward")
    b.compute(0, "add_", writes=(made,), source="net.py:9 in forward")
    holders = top_holders(b.build(), num=3)
    assert [(h.bytes, str(h)) for h in holders] == [
        (100, "weight"),
        (30, "mm [net.py:7 in forward]"),
        (20, "storage 2"),
    ]


def test_no_top_holders_at_all_is_refused():
    with pytest.raises(ValueError, match="num is 0; expected at least 1"):
        top_holders(activations(), num=0)


def test_memory_of_the_host_is_not_the_devices():
    program = ProgramBuilder(1).build()
    batch = StorageLife(0, 0, 64, 0, None, "default", host=True, pinned=True)
    assert peak_bytes(replace(program, storages=(batch,))) == 0


def test_a_free_in_front_of_an_operator_comes_before_its_allocation():
    b = ProgramBuilder(1)
    old = b.storage(0, bytes=50)
    b.compute(0, "mm", ns=1)
    b.free(0, old)
    b.storage(0, bytes=60)
    assert peak_bytes(b.build()) == 60
    assert [life.bytes for life in held_at_peak(b.build())] == [60]


def test_a_rank_without_storages_holds_nothing():
    assert live_bytes(ProgramBuilder(2).build(), 1) == [(0, 0)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_was_not_recorded_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank} was not recorded.*0 to 1"):
        live_bytes(ProgramBuilder(2).build(), rank)


lives = st.builds(
    lambda storage, bytes, born, length: StorageLife(
        0, storage, bytes, born, None if length is None else born + length, "default"
    ),
    st.integers(0, 99),
    st.integers(0, 50),
    st.integers(0, 10),
    st.none() | st.integers(1, 5),
)


@given(st.lists(lives, max_size=8))
def test_live_bytes_are_the_sum_of_what_lives(storages):
    program = Program(((),), 1, storages=tuple(storages))
    for index, live in live_bytes(program):
        assert live == sum(
            s.bytes
            for s in storages
            if s.born <= index and (s.freed is None or index < s.freed)
        )
