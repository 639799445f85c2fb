"""What the notebook of lab 08 calls: `from overlaplab_course import lab08 as lab`."""

from overlaplab.grading.kept import Kept, print_finding, side_by_side
from overlaplab_course.lab08.alternating import RATE, two_sets
from overlaplab_course.lab08.bill import EXAMPLE, EXAMPLE_IB, bill_table, buckets_table
from overlaplab_course.lab08.given import feed, feed_slots, part
from overlaplab_course.lab08.late import FromHooks, costs_text, train
from overlaplab_course.lab08.measured import gpu_feeds, gpu_reducers
from overlaplab_course.lab08.serving import serve
from overlaplab_course.lab08.show import (
    feed_at_depth,
    ours_in_slots,
    ours_late,
    own_bill,
)
from overlaplab_course.lab08.staleness import (
    draw_losses,
    largest_rate,
    last,
    losses,
    walk,
)
from overlaplab_course.lab08.trainer import play_trainer, trainers_table

_kept = Kept(
    {"8.1": "prefetch", "8.2": "double_buffered", "8.3": "LateReducer"},
    __name__,
)
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
