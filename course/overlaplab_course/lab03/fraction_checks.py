"""The grader of 3.1b: of three ratios that people mix up, the one that is asked for."""

from __future__ import annotations

from overlaplab.grading import Sheet, stage
from overlaplab.grading.declared import Declared
from overlaplab.program import Program, resolve
from overlaplab_course.lab03.jobs import EAGER, NUM_RANKS, Played, by_label

LAB = Declared(__file__)
THE_RUN, OVERLAP = LAB.sentences("3.1b")
WITHIN = 0.01


@LAB.grader("3.1b")
def grade_fraction(sheet: Sheet, other: object, overlap_fraction: float) -> None:
    """Read the learner's run on a machine where all ratios differ."""
    sheet.ran(f"your run on {NUM_RANKS} ranks, in {EAGER.name}")
    machine, program = stage.job(_read, other)
    LAB.refuse(sheet, THE_RUN, machine != EAGER.name, found=machine or repr(other))
    sheet.stop_if_wrong()
    timeline = by_label(resolve(program, EAGER)).of_rank(0)
    sheet.show(timeline, title="your run")
    report = timeline.report()
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


def _read(other: object) -> tuple[str, Program | None]:
    """On which machine a run was timed, "" if it is no run; and its record."""
    if not isinstance(other, Played):
        return "", None
    return other.run.timeline.hardware, other.program
