"""What the notebook of lab 01 calls: `from overlaplab_course import lab01 as lab`.

Its exercises are graded in `shortest`, `bounds`, `formula`, `ratios`, `layers`,
`messages`, `share`, `knobs` and `repair`.
"""

from __future__ import annotations

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab_course.lab01 import bounds, messages, reference, share
from overlaplab_course.lab01.figures import a_gigabyte, count, draw_counted
from overlaplab_course.lab01.formula import cards, with_contention
from overlaplab_course.lab01.knobs import KNOBS, WHAT_IF, saved_percent, turn
from overlaplab_course.lab01.layers import step_and_hidden
from overlaplab_course.lab01.measured import (
    machine,
    measure_it_here,
    measured,
    measured_alone,
)
from overlaplab_course.lab01.messages import link_of
from overlaplab_course.lab01.numbers import said_timeline
from overlaplab_course.lab01.ratios import contended, totals_of, uncontended
from overlaplab_course.lab01.repair import jobs
from overlaplab_course.lab01.share import GLOBAL_TOKENS, GPUS, LINKS, PARAMETERS
from overlaplab_course.lab01.share import true_share as given_share
from overlaplab_course.lab01.shortest import job
from overlaplab_course.lab01.steps import (
    GPU,
    GRADIENT_BYTES,
    from_backward,
    recorded,
    slow_gpu,
    ten_layers,
)

__all__ = [
    "GLOBAL_TOKENS",
    "GPU",
    "GPUS",
    "GRADIENT_BYTES",
    "KNOBS",
    "LINKS",
    "PARAMETERS",
    "WHAT_IF",
    "a_gigabyte",
    "cards",
    "contended",
    "count",
    "draw_counted",
    "from_backward",
    "given_share",
    "job",
    "jobs",
    "keep",
    "link_of",
    "machine",
    "measure_it_here",
    "measured",
    "measured_alone",
    "mine_or_ours",
    "recorded",
    "said_timeline",
    "saved_percent",
    "side_by_side",
    "slow_gpu",
    "step_and_hidden",
    "ten_layers",
    "totals_of",
    "turn",
    "uncontended",
    "with_contention",
]

_kept = Kept(
    {
        "1.4": reference.ratios,
        "1.5": reference.schedule,
    }
)
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours
