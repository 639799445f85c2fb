"""Exercise 3.2: order three streams with the fewest waits for events.

The learner's number draws the job. A wait is a pair (who must have ended, who waits);
the course issues the tasks and waits as told. Judged by the run: hazards, step, count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from overlaplab import streams
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.violation import Violation
from overlaplab_course.lab03.jobs import Job, Wait, fewest_waits, pipeline_job
from overlaplab_course.lab03.play import Played, Task, play, wrong_values

KNOWN = "every wait is for a task that is launched earlier"
SAFE = "no stream touches bytes that another may still use"
VALUES = "every result is right on every rank"
SHORT = "the step is as short as with every wait, 2 % more at most"
FEW = "no wait is left that stream order and the others imply"


@dataclass(frozen=True)
class IssueWith:
    """Issue tasks on a stream for each kind, waiting as `waits` says."""

    waits: tuple[Wait, ...]

    def __call__(self, tasks: Iterable[Task]) -> None:
        caller = streams.current_stream()
        side = {"compute": caller, "wire": streams.Stream(), "load": streams.Stream()}
        side["wire"].wait_stream(caller)
        side["load"].wait_stream(caller)
        ended: dict[str, Any] = {}
        for task in tasks:
            own = side[task.on]
            for first, then in self.waits:
                if then == task.name:
                    own.wait_event(ended[first])
            with streams.stream(own):
                task.run()
            ended[task.name] = own.record_event()
        caller.wait_stream(side["wire"])
        caller.wait_stream(side["load"])


@dataclass(frozen=True)
class Pipeline:
    """One learner's job on three streams; it prints as its table."""

    job: Job

    @property
    def every_wait(self) -> list[Wait]:
        """A wait for each need on another stream: enough, and too many."""
        return list(self.job.waits)

    def play(self, waits: Iterable[Wait]) -> Played:
        """Run the job with these waits.

        Raises:
            ValueError: a wait names no task, or one that is launched later.
        """
        problems = misfits(self.job, waits)
        if problems:
            raise ValueError(problems[0].message)
        return play(self.job, IssueWith(tuple(waits)))

    def __str__(self) -> str:
        return str(self.job)

    __repr__ = __str__


@lru_cache(maxsize=16)
def pipeline(number: int) -> Pipeline:
    """The job that belongs to a learner's number."""
    return Pipeline(pipeline_job(number))


def num_needed(mine: Pipeline) -> int:
    """How many waits are enough."""
    return len(fewest_waits(mine.job))


def compare_waits(mine: Pipeline, said: object) -> None:
    """Print the number that are needed beside a guess, and which follow from others."""
    fewest = fewest_waits(mine.job)
    said = "nothing" if said is None else said
    print(f"waits needed:  you said {said}, it is {len(fewest)}")
    for pair in mine.every_wait:
        if pair not in fewest:
            print(f"follows from others: {pair}")


@lru_cache(maxsize=16)
def with_every_wait(number: int) -> Played:
    """The learner's job with a wait for each need."""
    own = pipeline(number)
    return own.play(own.every_wait)


def misfits(job: Job, waits: Iterable[Wait]) -> list[Violation]:
    """Waits that are no pair of tasks in launch order."""
    order = [p.name for p in job.pieces]
    found = []
    for wait in waits:
        names = tuple(wait) if isinstance(wait, (tuple, list)) else (wait,)
        if len(names) != 2 or any(name not in order for name in names):
            message = f"{wait!r} is no pair of tasks of this job"
        elif order.index(names[0]) >= order.index(names[1]):
            message = (
                f"{wait!r}: {names[0]!r} is launched after {names[1]!r}, so its event "
                "is not recorded yet; a GPU would not wait at all"
            )
        else:
            continue
        found.append(
            Violation("waits", message, "(who must have ended, who waits for it)")
        )
    return found


@exercise(
    "3.2",
    title="the fewest waits",
    solution=("my_number", "my_waits"),
    verifies=(KNOWN, SAFE, VALUES, SHORT, FEW),
    points=2,
    timeout_s=30.0,
)
def grade_waits(sheet: Sheet, my_number: int, my_waits: Iterable[Wait]) -> None:
    """Any set of waits will do that keeps order and overlap and is as small."""
    own = pipeline(my_number)
    waits = list(my_waits)
    sheet.ran(f"your job, no. {my_number}, with {len(waits)} waits, on 2 ranks")
    sheet.verify(KNOWN, misfits(own.job, waits))
    sheet.stop_if_wrong()
    played, full = own.play(waits), with_every_wait(my_number)
    sheet.show(
        played.timeline,
        step_ns=played.step_ns,
        target_ns=full.step_ns,
        title=f"your run with {len(waits)} waits",
    )
    missing = [
        replace(
            violation,
            hint="the finding names two tasks: which wait, or chain of waits, leads "
            "from the first to the second?",
        )
        for violation in laws.no_findings_law(played.findings)
    ]
    sheet.verify(SAFE, missing)
    sheet.verify(VALUES, wrong_values(played, full))
    sheet.stop_if_wrong()
    sheet.verify(
        SHORT,
        [
            replace(violation, hint="which task waits for one that it does not need?")
            for violation in laws.step_law(played.step_ns, full.step_ns)
        ],
    )
    sheet.verify(FEW, _too_many(own.job, waits))
    sheet.note(
        f"{len(own.job.waits)} waits would do, {len(waits)} are enough: all others "
        "follow from stream order and these"
    )


def _too_many(job: Job, waits: list[Wait]) -> list[Violation]:
    fewest = fewest_waits(job)
    if len(waits) <= len(fewest):
        return []
    spare = next((w for w in waits if w not in fewest), waits[-1])
    return [
        Violation(
            "waits",
            f"{len(waits)} waits",
            "fewer",
            f"leave out {spare}: is there a finding? If not, who waits in its place?",
        )
    ]
