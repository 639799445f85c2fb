"""What lab 08 shows: the course's own runs, where a cell needs one beside a guess."""

from __future__ import annotations

from functools import lru_cache

from overlaplab.techniques.double_buffer import BatchPrefetcher
from overlaplab.view import format_bytes
from overlaplab_course import stored
from overlaplab_course.lab08 import given, late
from overlaplab_course.lab08.given import Fed, Loop
from overlaplab_course.lab08.late import Trained
from overlaplab_course.peaks import most_bytes


@lru_cache(maxsize=4)
def ours_in_slots(*, reads_loss: bool = False) -> Fed:
    """The loop of section 1 with the course's own double buffer."""
    from overlaplab_course.lab08 import reference

    loop = given.FILLED[0]._replace(reads_loss=reads_loss)
    return given.feed_slots(reference.double_buffered, loop)


@lru_cache(maxsize=1)
def ours_late() -> Trained:
    """Four steps of section 4 with the course's own late reducer."""
    from overlaplab_course.lab08 import reference

    return late.train(reference.LateReducer)


@lru_cache(maxsize=8)
def feed_at_depth(depth: int, *, stutter: bool = False) -> Fed:
    """Section 1's loop with the library's prefetcher; or one whose loader stutters."""
    loop = given.FILLED[0]
    if stutter:
        loop = Loop("one slow fill", 12, (1, 1), 1, 4, False, 2, ((7, 14),))
    return given.feed_slots(lambda x, *_: iter(BatchPrefetcher(x, depth=depth)), loop)


def own_bill(one_slot: Fed, undelayed: Trained) -> str:
    """What the second buffers of 8.2 and 8.3 cost and won, a step."""
    slots, late_run = ours_in_slots(), ours_late()
    batch = 16384 * slots.loop.copy_ms
    more = most_bytes(late_run.program) - most_bytes(undelayed.program)
    steps = {"one": one_slot, "two": slots}
    per_step = {k: v.step_ns / 1e6 / v.loop.num_batches for k, v in steps.items()}
    both = [run.step_ns / 1e6 / run.case.num_steps for run in (undelayed, late_run)]
    rows = [
        (
            "a slot of each kind",
            f"{format_bytes(batch)}, and as much pinned",
            f"{per_step['one']:.1f}",
            f"{per_step['two']:.1f}",
        ),
        ("gradients", format_bytes(more), f"{both[0]:.1f}", f"{both[1]:.1f}"),
    ]
    head = ("a second", "more memory", "ms per step before", "after")
    return stored.text_table(head, rows)
