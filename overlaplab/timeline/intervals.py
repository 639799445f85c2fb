"""Exact arithmetic on sets of integer intervals [start, end).

A set is a list of intervals that are non-empty, ascending and do not touch; `merge`
makes one of anything, the others take and return such lists. Knows no spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of any intervals; empty ones vanish, touching ones become one.

    >>> merge([(5, 9), (0, 3), (3, 4), (6, 7), (8, 8)])
    [(0, 4), (5, 9)]
    """
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What lies in both sets.

    >>> intersect([(0, 10)], [(2, 3), (8, 12)])
    [(2, 3), (8, 10)]
    """
    both: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What lies in `a` and not in `b`.

    >>> subtract([(0, 10)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    rest: list[Interval] = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                rest.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def total(intervals: Iterable[Interval]) -> int:
    """The length of a set."""
    return sum(end - start for start, end in intervals)
