"""The bytes of an access: how many, where, and whether two share one.

`overlap` is exact for strided ranges, without listing them.
"""

from __future__ import annotations

from math import gcd

from overlaplab.program.record import Access

_MOST_RUNS = 1024


def num_bytes(access: Access) -> int:
    """Bytes of an access, those of overlapping runs counted each time."""
    total = access.run_bytes
    for size, _ in access.dims:
        total *= size
    return total


def runs(
    size: tuple[int, ...], stride: tuple[int, ...], item: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Canonical (run_bytes, dims) of a strided tensor with at least one element."""
    dims = sorted(
        ((n, s * item) for n, s in zip(size, stride, strict=True) if n > 1 and s),
        key=lambda dim: dim[1],
    )
    run = item
    outer: list[tuple[int, int]] = []
    for n, step in dims:
        if not outer and step == run:
            run *= n
        elif outer and step == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * n, outer[-1][1])
        else:
            outer.append((n, step))
    return run, tuple(reversed(outer))


def byte_runs(access: Access) -> list[tuple[int, int]]:
    """The contiguous runs of an access, [start, end) in its storage.

    Where they fill their hull (a transposed matrix), or are too many to follow one by
    one, the hull stands for them.
    """
    if not access.dims:  # most are one run
        start, length = access.offset_bytes, access.run_bytes
        return [(start, start + length)] if length else []
    total = num_bytes(access)
    if total == 0:
        return []
    last = sum((size - 1) * stride for size, stride in access.dims)
    hull = (access.offset_bytes, access.offset_bytes + last + access.run_bytes)
    if total == hull[1] - hull[0] or total // access.run_bytes > _MOST_RUNS:
        return [hull]
    starts = [access.offset_bytes]
    for size, stride in access.dims:
        starts = [start + i * stride for start in starts for i in range(size)]
    return [(start, start + access.run_bytes) for start in starts]


def overlap(one: Access, other: Access) -> bool:
    """Whether `one` and `other` have a byte in common.

    Column slices of one matrix interleave without sharing a byte; their first and last
    bytes do not tell. The question is whether integers c_i exist with 0 <= c_i < n_i
    and a sum of c_i * stride_i in an interval. Where strides nest, as those of tensors
    do, at most three values of each c_i can reach it, so the search is short.

    >>> left = Access(0, offset_bytes=0, run_bytes=8, dims=((4, 16),))
    >>> right = Access(0, offset_bytes=8, run_bytes=8, dims=((4, 16),))
    >>> overlap(left, right), overlap(left, left)
    (False, True)
    """
    if one.storage != other.storage or _empty(one) or _empty(other):
        return False
    # offset_1 + sum_1 + r_1 = offset_2 + sum_2 + r_2, with 0 <= r < run_bytes. The
    # second sum is counted down from its end, which makes all signs positive.
    reach = sum((size - 1) * stride for size, stride in other.dims)
    distance = other.offset_bytes - one.offset_bytes + reach
    low, high = distance - one.run_bytes + 1, distance + other.run_bytes - 1
    counts: dict[int, int] = {}
    for size, stride in (*one.dims, *other.dims):
        if stride and size > 1:
            counts[stride] = counts.get(stride, 0) + size - 1
    return _reachable(sorted(counts.items(), reverse=True), low, high)


def _empty(access: Access) -> bool:
    return access.run_bytes <= 0 or any(size <= 0 for size, _ in access.dims)


def _reachable(terms: list[tuple[int, int]], low: int, high: int) -> bool:
    """Is a sum of c * stride, 0 <= c <= most, in [low, high]? Largest stride first."""
    if high < 0 or low > sum(stride * most for stride, most in terms):
        return False
    if low <= 0:
        return True
    step = gcd(*(stride for stride, _ in terms))
    if high // step * step < low:
        return False
    (stride, most), rest = terms[0], terms[1:]
    if not rest:
        return True  # a multiple of the stride lies in the interval and in reach
    reach = sum(s * m for s, m in rest)
    first = max(0, -(-(low - reach) // stride))
    return any(
        _reachable(rest, low - c * stride, high - c * stride)
        for c in range(min(most, high // stride), first - 1, -1)
    )
