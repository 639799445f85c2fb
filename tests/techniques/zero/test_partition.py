"""Laws of the partition: every element once, on one rank, padding counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.techniques.zero.partition import ALIGNMENT, plan_partition

shapes = st.lists(
    st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=0, max_size=6
)
worlds = st.integers(1, 9)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])


def planned(sizes, world_size, itemsize):
    named = [(f"t{i}", shape) for i, shape in enumerate(sizes)]
    return plan_partition(named, world_size, itemsize)


@given(shapes, worlds, itemsizes)
def test_every_element_is_on_exactly_one_rank_in_order(sizes, world_size, itemsize):
    partition = planned(sizes, world_size, itemsize)
    for index, entry in enumerate(partition.entries):
        found = []
        for rank in range(world_size):
            piece = list(partition.pieces(rank))[index]
            assert len(piece) == piece.in_tensor[1] - piece.in_tensor[0]
            place = rank * partition.shard_numel + piece.in_shard[0]
            if len(piece):
                assert place - entry.offset == piece.in_tensor[0]
            found += range(*piece.in_tensor)
        assert found == list(range(entry.numel))
        assert entry.shape == sizes[index]


@given(shapes, worlds, itemsizes)
def test_pieces_stay_inside_the_shard_and_never_overlap(sizes, world_size, itemsize):
    partition = planned(sizes, world_size, itemsize)
    for rank in range(world_size):
        end = 0
        for piece in partition.pieces(rank):
            if len(piece):
                assert end <= piece.in_shard[0]
                end = piece.in_shard[1]
        assert end <= partition.shard_numel


@given(shapes, worlds, itemsizes)
def test_padding_is_what_no_tensor_has_and_stays_small(sizes, world_size, itemsize):
    partition = planned(sizes, world_size, itemsize)
    on_ranks = sum(len(p) for r in range(world_size) for p in partition.pieces(r))
    assert on_ranks + partition.num_padding == partition.numel
    assert partition.full_bytes == world_size * partition.shard_bytes
    assert partition.num_padding < ALIGNMENT * (len(sizes) + world_size) + world_size


@given(shapes, worlds, itemsizes)
def test_tensors_and_shards_begin_at_multiples_of_8_elements(sizes, world, itemsize):
    partition = planned(sizes, world, itemsize)
    offsets = [entry.offset for entry in partition.entries]
    for place in (*offsets, partition.shard_numel):
        assert place % ALIGNMENT == 0


def test_twenty_rows_over_eight_ranks_leave_one_rank_with_padding_alone():
    # D07: 20 rows of 2 would be [3, 3, 3, 3, 3, 3, 2, 0] rows.
    partition = plan_partition([("w", (20, 2))], world_size=8)
    assert str(partition) == (
        "1 tensors over 8 ranks: shards of 8 elements, 24 of 64 padding\n"
        "rank 0   w[0:8]\n"
        "rank 1   w[8:16]\n"
        "rank 2   w[16:24]\n"
        "rank 3   w[24:32]\n"
        "rank 4   w[32:40]\n"
        "rank 5   (padding)\n"
        "rank 6   (padding)\n"
        "rank 7   (padding)"
    )


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ([], {"world_size": 0}, "world_size is 0"),
        ([], {"world_size": 1, "itemsize": 0}, "itemsize is 0"),
        ([("a", (1,)), ("a", (1,))], {"world_size": 1}, "a is there twice"),
        ([("a", (2, -1))], {"world_size": 1}, r"a has shape \(2, -1\)"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_its_numbers(tensors, settings, message):
    with pytest.raises(ValueError, match=message):
        plan_partition(tensors, **settings)


def test_a_rank_that_is_not_there_has_no_pieces():
    with pytest.raises(ValueError, match="rank is 2; expected 0 to 1"):
        list(plan_partition([], world_size=2).pieces(2))
