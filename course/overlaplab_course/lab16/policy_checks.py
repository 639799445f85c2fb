"""The grader of lab 16's selective checkpoints, 16.4: two kinds of blocks train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlaplab.cluster.run import Run
from overlaplab.grading import Sheet
from overlaplab_course.lab16 import trained
from overlaplab_course.lab16.chain_checks import LAB
from overlaplab_course.lab16.policies import CASES, runs
from overlaplab_course.lab16.trained import WIDE

DEAR, CHEAP = LAB.sentences("16.4")
SLACK = 0.05  # of what all computed again would take or leave free
Policy = Callable[..., Any]


@LAB.grader("16.4")
def grade_policy(sheet: Sheet, policy: Policy) -> None:
    """Time and bytes, each beside the course's own policy and both extremes."""
    for name, model in CASES.items():
        sheet.ran(f"two {name}, their checkpoints with your policy")
        mine = trained.train(trained.selective(policy), model, WIDE)
        ours, plain, again = (runs(name, how) for how in ("ours", "plain", "again"))
        sheet.show(mine.timeline, title=f"your policy: {name}")
        extra, least, most = (
            (run.timeline.step_ns - plain.timeline.step_ns) / 1e3
            for run in (mine, ours, again)
        )
        facts: dict[str, Any] = {"name": name, "extra": extra}
        slow = extra > least + SLACK * (most - least)
        LAB.refuse(sheet, DEAR, slow, least=least, most=most, **facts)
        held, enough, all_kept, none_kept = map(_kib, (mine, ours, plain, again))
        large = held > enough + SLACK * (all_kept - none_kept)
        facts = {"name": name, "held": held, "least": enough, "most": all_kept}
        LAB.refuse(sheet, CHEAP, large, **facts)
        sheet.stop_if_wrong()


def _kib(run: Run) -> int:
    (memory,) = run.timeline.memory
    return memory.peak_bytes >> 10
