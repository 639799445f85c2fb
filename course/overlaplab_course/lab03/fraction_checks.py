"""The grader of 3.1b: of three ratios that people mix up, the one that is asked for."""

from __future__ import annotations

from overlaplab.grading import Sheet
from overlaplab.grading.declared import Declared
from overlaplab_course.lab03.jobs import EAGER, NUM_RANKS, Played

LAB = Declared(__file__)
THE_RUN, OVERLAP = LAB.sentences("3.1b")
WITHIN = 0.01


@LAB.grader("3.1b")
def grade_fraction(sheet: Sheet, other: Played, overlap_fraction: float) -> None:
    """Read the learner's run on a machine where all ratios differ."""
    sheet.ran(f"your run on {NUM_RANKS} ranks, in {EAGER.name}")
    is_run = isinstance(other, Played)
    machine = other.run.timeline.hardware if is_run else None
    LAB.refuse(sheet, THE_RUN, machine != EAGER.name, found=machine or repr(other))
    sheet.stop_if_wrong()
    sheet.show(other.timeline, title="your run")
    report = other.timeline.report()
    hidden, sent = report.hidden_ns, report.communication_ns
    said = float(overlap_fraction)
    others = {
        "percent": 100 * hidden / sent,
        "exposed": 1 - hidden / sent,
        "saved": report.saved_fraction,
        "efficiency": report.efficiency,
        "compute": hidden / report.compute_ns,
        "step": hidden / report.step_ns,
    }
    taken_for = (
        name
        for name, ratio in others.items()
        if ratio is not None and abs(said - ratio) <= WITHIN * max(1.0, ratio)
    )
    wrong = not abs(said - hidden / sent) <= WITHIN
    LAB.refuse(sheet, OVERLAP, wrong, why=next(taken_for, ""), said=overlap_fraction)
