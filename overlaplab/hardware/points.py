"""Measured curves: (work, ns) points, and exact integers between them.

A rate is one number; real kernels and wires need more where they are small. Points are
what calibration measures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Points = tuple[tuple[int, int], ...]


def interpolate(points: Points, work: int) -> int:
    """The time of `work` by measured `points`, in whole nanoseconds, rounded up.

    Below the first point its time; between two the straight line; beyond the last in
    proportion to it (twice the work, twice its time).

    Args:
        points: (work, ns), ascending; see `check_points`.
        work: FLOPs or bytes, as the points are.

    >>> curve = ((100, 50), (300, 60), (1000, 200))
    >>> [interpolate(curve, work) for work in (0, 100, 200, 201, 1000, 3000)]
    [50, 50, 55, 56, 200, 600]
    """
    before, ns = points[0]
    if work <= before:
        return ns
    for after, later_ns in points[1:]:
        if work <= after:
            return ns + -(-(work - before) * (later_ns - ns) // (after - before))
        before, ns = after, later_ns
    return -(-work * ns // before)


def check_points(key: str, value: Any) -> Points:
    """`value` as points of our own.

    Raises:
        ValueError: no pairs of integers, none at all, work not ascending, time falling,
            or nothing at the end to extrapolate from; the message names `key`.
    """
    expected = (
        f"{key}: expected one or more pairs (work, ns) of integers, work ascending, ns "
        "not falling"
    )
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise ValueError(f"{expected}; found {value!r}")
    points: list[tuple[int, int]] = []
    for number, pair in enumerate(value):
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or any(isinstance(n, bool) or not isinstance(n, int) for n in pair)
            or min(pair) < 0
        ):
            raise ValueError(f"{expected}; point {number} is {pair!r}")
        if points and (pair[0] <= points[-1][0] or pair[1] < points[-1][1]):
            raise ValueError(
                f"{expected}; point {number} is {tuple(pair)} behind {points[-1]}"
            )
        points.append((pair[0], pair[1]))
    if not points or min(points[-1]) == 0:
        last = f"the last is {points[-1]}, and" if points else "there is none, and"
        raise ValueError(f"{expected}; {last} the last gives the rate beyond it")
    return tuple(points)
