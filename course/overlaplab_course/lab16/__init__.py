"""What the notebook of lab 16 calls: `from overlaplab_course import lab16 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.gpts import make_gpt, step_of
from overlaplab_course.lab16.blocks24 import (
    GPT24,
    blocks_of_24,
    budgets_table,
    operators_table,
    policies_table,
    timeline_of,
    train_24,
)
from overlaplab_course.lab16.chains import (
    UNEVEN,
    best_by,
    brute_force,
    cheapest_first,
    extra_ms,
    largest_first,
    random_chain,
    walk,
)
from overlaplab_course.lab16.gpt import (
    bill_table,
    peak_percent,
    peaks_table,
    record,
)
from overlaplab_course.lab16.masks import draws_text
from overlaplab_course.lab16.measured import gpu_frontier
from overlaplab_course.lab16.overlap import EXAMPLE as SIX
from overlaplab_course.lab16.overlap import MESSAGES
from overlaplab_course.lab16.overlap import step as overlapped
from overlaplab_course.lab16.show import (
    chain_table,
    draw_budgets,
    draw_curves,
    draw_memory,
    most_lost,
)
from overlaplab_course.lab16.stack import sweep
from overlaplab_course.lab16.trained import NARROW, checkpoint_every_block
from overlaplab_course.pictures import life_of_an_activation

_kept = Kept(
    {
        "16.2": "segmented",
        "16.3": "fastest",
        "16.4": "policy",
        "16.5": "compare",
        "16.7": "step_ms",
    },
    __name__,
)
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
