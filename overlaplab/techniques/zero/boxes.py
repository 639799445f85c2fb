"""Flat pieces as boxes of their tensor: what torch.distributed.checkpoint stores.

Knows shapes only. A range of a tensor's elements, as they lie in memory, begins in the
middle of a row and ends in the middle of another one. It is a few boxes, one behind the
other: the end of the first row, the whole rows, the beginning of the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """(offsets, sizes) of the boxes that elements `begin` to `end` are, in order.

    At most two for each dimension but the innermost, and one more.

    Args:
        shape: of a tensor, in the order in which its elements lie in memory.
        begin, end: in its elements; an empty range has no box.

    >>> list(boxes_of_range((4, 3), 1, 11))
    [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # whole rows
    if first > last:  # inside one row
        yield from _inside(shape, last, begin, end)
        return
    yield from _inside(shape, first - 1, begin, first * inner)
    if first < last:
        rest = tuple(shape[1:])
        yield (first, *[0] * len(rest)), (last - first, *rest)
    yield from _inside(shape, last, last * inner, end)


def _inside(shape: Sequence[int], row: int, begin: int, end: int) -> Iterator[Box]:
    """Boxes of a range inside one row."""
    inner = math.prod(shape[1:])
    at = row * inner
    for offsets, sizes in boxes_of_range(shape[1:], begin - at, end - at):
        yield (row, *offsets), (1, *sizes)
