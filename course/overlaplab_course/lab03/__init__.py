"""What the notebook of lab 03 calls: `from overlaplab_course import lab03 as lab`.

Graders stand in `checks`; nothing here imports them or the course's solutions.
"""

from __future__ import annotations

from overlaplab.grading.kept import Kept, print_finding, side_by_side
from overlaplab_course.lab03.given import (
    KNOBS,
    Case,
    copy_ms,
    feed_loop,
    finish_with,
    on_streams,
    problem_with,
    steps_ms,
    turn,
)
from overlaplab_course.lab03.jobs import (
    EAGER,
    Pipeline,
    backward_job,
    pipeline,
    play,
)
from overlaplab_course.lab03.jobs import fewest_waits as _fewest_waits
from overlaplab_course.lab03.show import (
    beside_the_sanitizer,
    on_gpus,
    sanitizer_report,
)
from overlaplab_course.pictures import lifetime_of_memory

case = Case
_kept = Kept({"3.1": "issue", "3.4": "feed"}, __name__)
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose


def compare_waits(mine: Pipeline, said: object) -> None:
    """Print the number that are needed beside a guess, and which follow from others."""
    fewest = _fewest_waits(mine)
    side_by_side("waits needed", said, len(fewest))
    for pair in mine.every_wait:
        if pair not in fewest:
            print(f"follows from others: {pair}")
