"""What the notebook of lab 00 calls: `from overlaplab_course import lab00 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab00 import measured, reference
from overlaplab_course.lab00.given import (
    BORDER_AT,
    GPU,
    KNOBS,
    LINES,
    count,
    holds_the_cpu,
    last_launch_ns,
    late_train,
    launch_table,
    model_and_batch,
    run_step,
    train,
    turn,
    two_ranks,
)
from overlaplab_course.lab00.launches import six_launches
from overlaplab_course.lab00.reference import train as good_train

WHAT_IF, saved_percent = turn.what_if, turn.saved_percent
_kept = Kept({"0.4": reference.step})
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours
