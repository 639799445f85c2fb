"""What the notebook of lab 03 calls: `from overlaplab_course import lab03 as lab`.

Its exercises are graded in `schedule`, `waits`, `repair`, `feed`, `enough` and `knobs`.
"""

from __future__ import annotations

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab03 import reference, schedule  # noqa: F401 (registers 3.1)
from overlaplab_course.lab03.enough import finish_with, on_streams, steps_ms
from overlaplab_course.lab03.feed import feed_loop
from overlaplab_course.lab03.jobs import backward_job
from overlaplab_course.lab03.knobs import (
    KNOBS,
    copy_ms,
    problem_with,
    turn,
)
from overlaplab_course.lab03.measured import (
    beside_the_sanitizer,
    measured,
    measured_ratio,
    off_by,
    sanitizer_report,
)
from overlaplab_course.lab03.play import play
from overlaplab_course.lab03.predicted import predicted_ms
from overlaplab_course.lab03.repair import Case
from overlaplab_course.lab03.waits import compare_waits, num_needed, pipeline

__all__ = [
    "KNOBS",
    "backward_job",
    "beside_the_sanitizer",
    "case",
    "compare_waits",
    "copy_ms",
    "feed_loop",
    "finish_with",
    "keep",
    "measured",
    "measured_ratio",
    "mine_or_ours",
    "num_needed",
    "off_by",
    "on_streams",
    "pipeline",
    "play",
    "predicted_ms",
    "problem_with",
    "sanitizer_report",
    "side_by_side",
    "steps_ms",
    "turn",
    "whose",
]

_kept = Kept({"3.1": reference.issue, "3.4": reference.feed})
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours


def whose(exercise_id: str) -> str:
    """ "yours", or "the course's" where the learner's has not passed."""
    return "yours" if exercise_id in _kept else "the course's"


def case(exercise_id: str, number: int) -> Case:
    """The broken program's objects that belong to a learner's number."""
    return Case(exercise_id, number)
