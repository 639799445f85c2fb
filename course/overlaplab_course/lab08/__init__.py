"""What the notebook of lab 08 calls: `from overlaplab_course import lab08 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab08.given import feed, feed_slots, part
from overlaplab_course.lab08.show import ours_in_slots

_OURS = {"8.1": "prefetch", "8.2": "double_buffered"}
_kept = Kept({k: f"overlaplab_course.lab08.reference:{v}" for k, v in _OURS.items()})
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
