"""What the notebook of lab 00 calls: `from overlaplab_course import lab00 as lab`.

Its exercises are graded in `schedule`, `returned`, `syncs`, `meet`, `reading` and
`knobs`.
"""

from __future__ import annotations

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab.timeline import Timeline
from overlaplab_course.lab00 import measured, schedule  # noqa: F401 (it registers its exercise)
from overlaplab_course.lab00.knobs import (
    BORDER_AT,
    KNOBS,
    WHAT_IF,
    saved_percent,
    turn,
)
from overlaplab_course.lab00.launches import Launch, six_launches
from overlaplab_course.lab00.meet import reference, run_step
from overlaplab_course.lab00.reading import two_ranks
from overlaplab_course.lab00.returned import count
from overlaplab_course.lab00.runs import (
    GPU,
    LINES,
    holds_the_cpu,
    is_launch,
    is_on_gpu,
    last_launch_ns,
    model_and_batch,
)
from overlaplab_course.lab00.syncs import good_train, late_train, train

__all__ = [
    "BORDER_AT",
    "GPU",
    "KNOBS",
    "LINES",
    "WHAT_IF",
    "Launch",
    "count",
    "good_train",
    "holds_the_cpu",
    "is_launch",
    "is_on_gpu",
    "keep",
    "last_launch_ns",
    "late_train",
    "launch_table",
    "measured",
    "mine_or_ours",
    "model_and_batch",
    "run_step",
    "saved_percent",
    "side_by_side",
    "six_launches",
    "train",
    "turn",
    "two_ranks",
]


_kept = Kept({"0.4": reference})
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours


def launch_table(timeline: Timeline, *, rank: int = 0) -> str:
    """Each operator of a rank: when it is launched, when it runs, how long it waits.

    In us; in the order of the launches.
    """
    own = [span for span in timeline.spans if span.rank == rank]
    launched = {s.attributes["op"]: s for s in own if is_launch(s)}
    ran = {s.attributes["op"]: s for s in own if is_on_gpu(s)}
    lines = [f"{'':<12}{'launched':>16}{'runs':>18}{'waits':>10}"]
    for op, launch in launched.items():
        if op not in ran:
            continue
        span = ran[op]
        waits_us = (span.start_ns - launch.end_ns) / 1000
        lines.append(
            f"{span.name:<12}"
            f"{_us(launch.start_ns):>7} to {_us(launch.end_ns):>5}"
            f"{_us(span.start_ns):>9} to {_us(span.end_ns):>5}"
            f"{waits_us:>7.0f} us"
        )
    return "\n".join(lines)


def _us(time_ns: int) -> str:
    return f"{time_ns / 1000:.0f}"
