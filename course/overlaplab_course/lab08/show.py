"""What lab 08 shows: the course's own runs, where a cell needs one beside a guess."""

from __future__ import annotations

from functools import lru_cache

from overlaplab_course.lab08 import given, reference
from overlaplab_course.lab08.given import Fed


@lru_cache(maxsize=4)
def ours_in_slots(*, reads_loss: bool = False) -> Fed:
    """The loop of section 1 with the course's own double buffer."""
    loop = given.FILLED[0]._replace(reads_loss=reads_loss)
    return given.feed_slots(reference.double_buffered, loop)
