"""What the notebook of lab 13 calls: `from overlaplab_course import lab13 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab13.graphs import (
    AFTER,
    graph_of,
    launches,
    needs_of,
    operators,
    waits,
)
from overlaplab_course.lab13.lists import by_layer, by_type, table_of, wrong_of
from overlaplab_course.lab13.moves import COSTS, timed

_OURS = {"13.1": "beside", "13.2": "launch_early", "13.3": "wait_late"}
_kept = Kept({k: f"overlaplab_course.lab13.reference:{v}" for k, v in _OURS.items()})
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
