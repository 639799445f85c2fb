"""Exercise 3.1: issue a list of tasks on two streams, with events between them.

Judged by what the streams did on a shown job and on jobs by lot: values, hazards, the
CPU's waits, the step. How many streams, events or passes it takes is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.violation import Violation
from overlaplab.program import Finding
from overlaplab_course.lab03 import reference
from overlaplab_course.lab03.jobs import Job, backward_job, drawn_job
from overlaplab_course.lab03.play import Issue, Played, Task, play, wrong_values
from overlaplab_course.lab03.waiting import cpu_waits

# Jobs by lot on which one stream, and streams that wait for all of one another, lose
# more than a tenth (a test holds them to it).
SEEDS = (9, 21, 46, 52)

VALUES = "every task runs once, and every result is right on every rank"
SAFE = "no stream touches bytes that another may still use"
FREE_CPU = "the CPU waits for nothing"
SHORT = "the steps are as short as the reference's, 2 % more at most"


@lru_cache(maxsize=1)
def jobs() -> tuple[Job, ...]:
    """The lesson's job, then four that the learner has not seen."""
    return (backward_job(), *map(drawn_job, SEEDS))


@lru_cache(maxsize=8)
def reference_run(index: int) -> Played:
    """The course's own solution on job `index`."""
    return play(jobs()[index], reference.issue)


def one_stream(tasks: Sequence[Task]) -> None:
    """Everything on the caller's stream, in launch order."""
    for task in tasks:
        task.run()


@exercise(
    "3.1",
    title="issue tasks on two streams",
    solution="issue",
    verifies=(SAFE, VALUES, FREE_CPU, SHORT),
    points=3,
    timeout_s=60.0,
)
def grade_issue(sheet: Sheet, issue: Issue) -> None:
    """Play five jobs; the first that is wrong is told and drawn."""
    for index, job in enumerate(jobs()):
        table = f"\n{job}" if index else ""
        sheet.ran(f"job '{job.name}' on 2 ranks, in slow motion{table}")
        played, right = play(job, issue), reference_run(index)
        sheet.show(
            played.timeline,
            step_ns=played.step_ns,
            target_ns=right.step_ns,
            title=f"your run of '{job.name}'",
        )
        sheet.verify(SAFE, [_with_hint(f) for f in played.findings])
        sheet.verify(VALUES, wrong_values(played, right))
        sheet.verify(FREE_CPU, cpu_waits(played.run))
        sheet.stop_if_wrong()
        sheet.verify(SHORT, slow(played, right))
        sheet.stop_if_wrong()
    first = reference_run(0)
    played = play(first.job, issue)
    sheet.ran(f"{len(jobs())} jobs on 2 ranks, in slow motion")
    sheet.show(
        played.timeline,
        step_ns=played.step_ns,
        target_ns=first.step_ns,
        title=f"your run of '{first.job.name}'",
    )


def _with_hint(finding: Finding) -> Violation:
    """A hazard, and which edge of the three kinds is missing."""
    (violation,) = laws.no_findings_law([finding])
    text = str(finding)
    first, _, then = text.partition("\n  then")
    if ", input" in first:
        hint = (
            "your second stream begins while the caller's stream still writes the "
            "input: what must it wait for first?"
        )
    elif ", collect" in then:
        hint = (
            "when issue returns, the caller reads the results on its own stream: "
            "which stream has not been waited for?"
        )
    else:
        hint = (
            "an event stands for what its stream held when it was recorded: is it "
            "recorded after the task, and does the right stream wait for it?"
        )
    return replace(violation, hint=hint)


def slow(played: Played, right: Played) -> list[Violation]:
    """`step_law`, with what the learner's streams may be waiting for."""
    serial_ns = play(played.job, one_stream).step_ns
    hint = (
        "wait_stream waits for everything launched there so far; an event waits for "
        "one task"
    )
    used = _streams_of_tasks(played)
    if len(used) == 1:
        hint = (
            f"all tasks ran on '{used.pop()}': which stream is current when run() is "
            "called?"
        )
    return [
        replace(
            violation,
            message=f"job '{played.job.name}': {violation.message}"
            + (", as on one stream" if played.step_ns >= 0.99 * serial_ns else "")
            + " (right results, but something waits for too much)",
            hint=hint,
        )
        for violation in laws.step_law(played.step_ns, right.step_ns)
    ]


def _streams_of_tasks(played: Played) -> set[str]:
    """The streams under which rank 0 launched the job's tasks."""
    assert played.run.program is not None
    names = {piece.name for piece in played.job.pieces}
    return {op.launch_stream for op in played.run.program.ranks[0] if op.label in names}
