"""What the notebook of lab 13 calls: `from overlaplab_course import lab13 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab13.apart import twins
from overlaplab_course.lab13.breaking import SHAPES, most_lost, shape, try_to_break
from overlaplab_course.lab13.graphs import (
    AFTER,
    all_before,
    graph_of,
    launches,
    needs_of,
    operators,
    waits,
)
from overlaplab_course.lab13.hooked import with_hooks
from overlaplab_course.lab13.lists import (
    by_layer,
    by_type,
    by_type_on_a_gpt,
    count_wrong,
    table_of,
    wrong_of,
)
from overlaplab_course.lab13.measured import NAMES, gpu_table, ms, won_table
from overlaplab_course.lab13.moves import COSTS, link, run_graph, timed
from overlaplab_course.lab13.ordering import (
    CASES,
    NINE,
    best_ms,
    drawn,
    end_ms,
    names_of,
)
from overlaplab_course.lab13.plans import merged, plan_graph, sent_bytes
from overlaplab_course.lab13.rows import last_operators, rows_on_gpus, rows_table
from overlaplab_course.lab13.shipped import passes_table, settings_table
from overlaplab_course.lab13.thesis import spread, thesis_table
from overlaplab_course.lab13.two_streams import cut

_kept = Kept(
    {"13.2": "launch_early", "13.3": "wait_late", "13.4": "plan_buckets"},
    __name__,
)
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours
