"""What the notebook of lab 16 calls: `from overlaplab_course import lab16 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab16.chains import (
    UNEVEN,
    brute_force,
    cheapest_first,
    extra_ms,
    largest_first,
    random_chain,
    walk,
)
from overlaplab_course.lab16.gpt import (
    bill_table,
    checkpoint_every_block,
    make_gpt,
    peak_mib,
    peak_percent,
    peaks_table,
    record,
    step_of,
)
from overlaplab_course.lab16.show import chain_table, draw_budgets, draw_memory

_OURS = {"16.1": "peak", "16.3": "fastest"}
_kept = Kept({k: f"overlaplab_course.lab16.reference:{v}" for k, v in _OURS.items()})
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
