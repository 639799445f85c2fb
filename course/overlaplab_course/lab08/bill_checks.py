"""The grader of lab 08's bill, 8.5: by what the answer loses, in time and in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from overlaplab.grading import Sheet
from overlaplab.grading.laws import regret_law
from overlaplab_course.lab08.bill import BUFFERS, Job
from overlaplab_course.lab08.feed_checks import LAB

USABLE, FITS, REGRET, NOTHING_SPARE = LAB.sentences("8.5")
AT_MOST = 0.20
Choose = Callable[[Mapping[str, float], Mapping[str, int], int], Any]


@lru_cache(maxsize=1)
def jobs() -> tuple[Job, ...]:
    """Trainings on four profiles, on which each constant answer fails."""
    return tuple(Job(**table) for table in LAB.cases("8.5", "jobs")[REGRET])


@LAB.grader("8.5")
def grade_bill(sheet: Sheet, what_to_double: Choose) -> None:
    """Each answer is timed on the profile, by a program of sixteen steps."""
    sheet.ran(f"what_to_double on {len(jobs())} trainings on four machines")
    lost: dict[str, float] = {}
    for job in jobs():
        answer = what_to_double(dict(job.ms), dict(job.mib), job.free_mib)
        choice = _read(answer)
        shown = f"{answer!r:.60}"
        LAB.refuse(sheet, USABLE, choice is None, name=job.name, answer=shown)
        if choice is None:
            return
        where: dict[str, Any] = {"name": job.name, "choice": list(choice)}
        took, free = job.bytes_of(choice), job.free_mib
        LAB.refuse(sheet, FITS, took > free, took=took, free=free, **where)
        if took > free:
            continue
        step, best = job.step_ms(choice), job.best_ms
        said = f"{job.name}: {list(choice)} takes {step:.1f} ms per step"
        lost[f"{said}, the best that fits {best:.1f}"] = job.regret(choice)
        spare = next(job.wasted(choice), "")
        less = job.step_ms([name for name in choice if name != spare])
        facts: dict[str, Any] = {"spare": spare, "step": step, "less": less}
        LAB.refuse(sheet, NOTHING_SPARE, bool(spare), **facts, **where)
    if lost:
        sheet.verify(REGRET, regret_law(lost, at_most=AT_MOST))


def _read(answer: object) -> tuple[str, ...] | None:
    """The buffers that were named, in our order; None for anything else."""
    if isinstance(answer, str) or not isinstance(
        answer, list | tuple | set | frozenset
    ):
        return None
    if any(name not in BUFFERS for name in answer):
        return None
    return tuple(name for name in BUFFERS if name in answer)
