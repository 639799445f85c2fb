"""Interval sets behave like sets of integers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from overlaplab.timeline.intervals import intersect, merge, subtract, total

points = st.integers(-20, 20)
intervals = st.lists(st.tuples(points, points), max_size=8)


def as_set(pieces):
    return {i for start, end in pieces for i in range(start, end)}


def is_canonical(pieces):
    edges = [edge for piece in pieces for edge in piece]
    return all(a < b for a, b in pairwise(edges))


@given(intervals)
def test_merge_keeps_every_point_and_nothing_else(raw):
    assert as_set(merge(raw)) == as_set(raw)
    assert is_canonical(merge(raw))


@given(intervals, intervals)
def test_intersect_is_the_intersection_of_the_points(raw_a, raw_b):
    a, b = merge(raw_a), merge(raw_b)
    assert as_set(intersect(a, b)) == as_set(a) & as_set(b)
    assert is_canonical(intersect(a, b))


@given(intervals, intervals)
def test_subtract_is_the_difference_of_the_points(raw_a, raw_b):
    a, b = merge(raw_a), merge(raw_b)
    assert as_set(subtract(a, b)) == as_set(a) - as_set(b)
    assert is_canonical(subtract(a, b))


@given(intervals, intervals)
def test_what_is_in_both_and_what_is_in_one_add_up(raw_a, raw_b):
    a, b = merge(raw_a), merge(raw_b)
    assert total(intersect(a, b)) + total(subtract(a, b)) == total(a)
