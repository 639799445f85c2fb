"""Graders of lab 03's extras: 3.1b, 3.5 to 3.7."""

from __future__ import annotations

from collections.abc import Mapping

from overlaplab.grading import Sheet, Violation, program_laws, stage
from overlaplab.grading.declared import Declared
from overlaplab.grading.forms import KnobTasks, Settings, need_dict
from overlaplab.grading.violation import ms
from overlaplab.program import Program, resolve
from overlaplab_course.lab03 import given
from overlaplab_course.lab03.jobs import EAGER, NUM_RANKS, Played, by_label

LAB = Declared(__file__)
THE_RUN, OVERLAP = LAB.sentences("3.1b")
(FEWEST,) = LAB.sentences("3.5")
SUM_READ, WAITED, NO_MORE = LAB.sentences("3.6")
SETTINGS, IS_DEAR, IS_FREE, IS_COPY = LAB.sentences("3.7")

# -- 3.1b: of three ratios that people mix up, the one that is asked for

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


# -- 3.5: how many streams are enough?


@LAB.grader("3.5")
def grade_enough(sheet: Sheet, enough: Mapping[str, int]) -> None:
    """Compare with a sweep from 1 to 6 streams."""
    sheet.ran("each job on 1 to 6 streams")
    said = need_dict(enough, "enough")
    wrong = []
    expected = "the fewest whose step no other number beats by more than 1 %"
    for kind in given.KINDS:
        steps = given.steps_ms(kind)
        least = 1.01 * min(steps.values())
        if said.get(kind) != min(n for n, step in steps.items() if step <= least):
            seen = f"{kind}: {said.get(kind)!r} streams"
            wrong.append(Violation("regret", seen, expected))
    sheet.verify(FEWEST, wrong, list_all=True)


# -- 3.6: what a stream's synchronize does not wait for


@LAB.grader("3.6")
def grade_finish(sheet: Sheet, my_number: int, finish: given.Finish) -> None:
    """The CPU goes on at the end of the collective: not before, not much later."""
    runs = ((int(my_number), NUM_RANKS), (int(my_number) + 1, 3))
    for number, num_ranks in runs:
        what = f"one all-reduce beside other work, sizes of number {number}"
        sheet.ran(f"{what}, {num_ranks} ranks")
        seen = given.finish_with(number, finish, num_ranks)
        sheet.show(seen.timeline, title="your run")
        program_laws.hold(sheet, seen.run)
        for timed in (seen, seen.on(EAGER)):
            facts = {"cpu": ms(timed.cpu_ns), "sum": ms(timed.sum_ns)}
            LAB.expect(sheet, WAITED, timed.cpu_ns >= timed.sum_ns, **facts)
            LAB.expect(sheet, NO_MORE, timed.cpu_ns <= 1.02 * timed.sum_ns, **facts)
        sheet.stop_if_wrong()
    sheet.show_first()


# -- 3.7: through the host's memory, or past it


def staging(settings: Settings) -> dict[str, float]:
    """What staging costs: of the step in percent, of the copy as a factor."""
    direct = given.turn(**{**settings, "staged": False})
    staged = given.turn(**{**settings, "staged": True})
    return {
        "costs": 100 * (staged.step_ns / direct.step_ns - 1),
        "busy": direct.report().communication_ns / direct.step_ns,
        "longer": given.copy_ms(staged) / given.copy_ms(direct),
    }


TASKS = KnobTasks(
    given.turn,
    LAB.tables("3.7"),
    measure=staging,
    listed=[name for name in given.KNOBS if name != "staged"],
    ran="your three settings, each with staging and without",
)
LAB.grader("3.7")(TASKS.grade)
