"""What the notebook of lab 02 calls: `from overlaplab_course import lab02 as lab`.

Its exercises are graded in `timing`, `merging`, `exposed`, `names`, `reading`, `gaps`,
`bill`, `broken` and `totals`.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab.timeline.intervals import intersect, merge, total
from overlaplab_course.lab02 import exposed, merging, names, rows, timing, totals
from overlaplab_course.lab02 import gaps as _gaps
from overlaplab_course.lab02.bill import both_steps, pairs, pay
from overlaplab_course.lab02.broken import profile_with, truth
from overlaplab_course.lab02.gaps import draw_gaps, with_gaps
from overlaplab_course.lab02.measured import on_gpus
from overlaplab_course.lab02.reading import read
from overlaplab_course.lab02.rows import Row, as_table, kernel, other
from overlaplab_course.lab02.stopwatch import Timed, clock
from overlaplab_course.lab02.timing import time_with, true_ms
from overlaplab_course.lab02.traces import (
    TRACES,
    did_it_pay,
    machine,
    path_of,
    raw_rows,
    spread_ms,
    step_rows,
    trace_step,
    traced_ms,
    unprofiled_ms,
    whole_steps,
    whole_trace,
)

__all__ = [
    "TRACES",
    "Row",
    "Timed",
    "as_table",
    "both_steps",
    "clock",
    "did_it_pay",
    "draw_gaps",
    "intersect",
    "is_communication",
    "keep",
    "kernel",
    "machine",
    "merge",
    "mine_or_ours",
    "on_gpus",
    "other",
    "pairs",
    "path_of",
    "pay",
    "profile_with",
    "raw_rows",
    "read",
    "side_by_side",
    "spread_ms",
    "step_rows",
    "time_with",
    "text_table",
    "total",
    "trace_step",
    "traced_ms",
    "true_ms",
    "truth",
    "unprofiled_ms",
    "whole_steps",
    "whole_trace",
    "with_gaps",
]

is_communication = rows.is_communication

_kept = Kept(
    {
        "2.1": timing.reference,
        "2.2": merge,
        "2.3": exposed.reference,
        "2.4": rows.is_communication,
        "2.6": _gaps.reference,
    }
)
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours


def text_table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Lines in columns: the first to the left, numbers to the right."""
    cells = [[str(cell) for cell in line] for line in (head, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
