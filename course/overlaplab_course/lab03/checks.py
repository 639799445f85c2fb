"""Graders of lab 03: 3.1 to 3.3. `feed_checks` has 3.4, `checks_extra` the extras.

They look at what the streams did, never at the code. How many streams, events or passes
it takes is free; values, findings, the CPU's waits and the step are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from overlaplab.grading import Sheet, Violation, laws, program_laws
from overlaplab.grading.forms import Examined, Repair, judge_step
from overlaplab.program import Finding
from overlaplab_course.lab03 import given, reference
from overlaplab_course.lab03.checks_extra import LAB
from overlaplab_course.lab03.feed_checks import LEAN, crowded
from overlaplab_course.lab03.jobs import (
    EAGER,
    NUM_RANKS,
    SET_UP,
    Issue,
    Job,
    Played,
    Task,
    Wait,
    backward_job,
    drawn_job,
    fewest_waits,
    one_stream,
    pipeline,
    play,
    three_tasks,
)

SAFE, ALL_RUN, FREE_CPU, SHORT_STEPS = LAB.sentences("3.1")
KNOWN, _, VALUES, SHORT_STEP, FEW = LAB.sentences("3.2")
DIAGNOSIS, _, _, _, OVERLAP_KEPT = LAB.sentences("3.3a")
CPU_HINT = "wait_event makes a stream wait, synchronize makes the CPU wait"


def wrong_results(
    seen: Examined,
    right: Examined,
    describe: Callable[[str, int], str] = lambda name, rank: (
        f"{name} is wrong on rank {rank}"
    ),
    *,
    expected: str = "each is computed, packed, sent and stepped once",
    hint: str = "",
) -> list[Violation]:
    """Every result on every rank is what the course's own solution gives.

    Args:
        describe: what is wrong, from the result's name and the rank.
    """
    return [
        Violation("values", describe(name, rank), expected, hint, rank=rank)
        for rank, ours in enumerate(right.values)
        for name, tensor in ours.items()
        if name not in (mine := seen.values[rank])
        or mine[name].shape != tensor.shape
        or not torch.allclose(mine[name], tensor, rtol=1e-5, atol=1e-6)
    ]


# -- 3.1a: one event

SendBeside = Callable[[Task, Task, Task], object]
BESIDE = ((three_tasks(2, 4, 3), NUM_RANKS), (three_tasks(3, 2, 5), 3))


def _as_issue(send_beside: SendBeside, tasks: Sequence[Task]) -> object:
    return send_beside(*tasks)


_OUR_BESIDE = partial(_as_issue, reference.send_beside)


@LAB.grader("3.1a")
def grade_beside(sheet: Sheet, send_beside: SendBeside) -> None:
    """An event between two streams, on three tasks."""
    _play_all(sheet, "3.1a", BESIDE, partial(_as_issue, send_beside), _OUR_BESIDE)


# -- 3.1: two streams, with events between them


# Random jobs on which one stream, and streams that wait for all of one another, lose
# more than a tenth (a test holds them to it).
SEEDS = (9, 21, 46, 52)


@lru_cache(maxsize=1)
def own_and_drawn() -> tuple[tuple[Job, int], ...]:
    """The lesson's job, four that the learner has not seen; not all in one world."""
    drawn = [(drawn_job(seed), 3 if seed == SEEDS[-1] else NUM_RANKS) for seed in SEEDS]
    return (backward_job(), NUM_RANKS), *drawn


@LAB.grader("3.1")
def grade_issue(sheet: Sheet, issue: Issue) -> None:
    """Play five jobs; the first that is wrong is described and drawn."""
    right = _play_all(sheet, "3.1", own_and_drawn(), issue, reference.issue)
    job, n = right.job, len(right.program.ranks)
    apart = program_laws.order_law(
        f"job '{job.name}'",
        lambda: play(job, issue, num_ranks=n, apart=True),
        lambda played: wrong_tasks(played, right),
    )
    sheet.verify(ALL_RUN, apart)


_by_ours = lru_cache(maxsize=8)(play)  # the course's own solution on a job


def _play_all(
    sheet: Sheet, id: str, on: Sequence[tuple[Job, int]], issue: Issue, ours: Issue
) -> Played:
    """Play each job on so many ranks; returns the last, as the course's own does it."""
    _, all_run, _, short_steps = LAB.sentences(id)
    for number, (job, n) in enumerate(on):
        table = f"\n{job}" if number else ""
        sheet.ran(f"job '{job.name}' on {n} ranks, in slow motion{table}")
        played = play(job, issue, num_ranks=n)
        right = _by_ours(job, ours, num_ranks=n)
        played.draw_on(sheet, right.step_ns, f"your run of '{job.name}'")
        program_laws.hold(
            sheet,
            played.run,
            wrong=wrong_tasks(played, right),
            once=program_laws.tasks_law(played.program, right.program),
            values=all_run,
            but=(SET_UP,),
            hints={"hazard": _missing_edge(played.findings), "cpu": CPU_HINT},
        )
        sheet.stop_if_wrong()
        sheet.verify(short_steps, slow(played, right))
        late = program_laws.slow_law(EAGER, played.program, right.program)
        sheet.verify(short_steps, late)
        sheet.stop_if_wrong()
    sheet.show_first(f"{len(on)} jobs on {NUM_RANKS} ranks, in slow motion")
    return right


def wrong_tasks(seen: Played, right: Played) -> list[Violation]:
    """Every buffer on every rank holds what the job computes in launch order."""

    def describe(buffer: str, rank: int) -> str:
        writers = [p.name for p in seen.job.pieces if p.writes == buffer]
        return (
            f"job '{seen.job.name}', rank {rank}: the result of "
            f"{' and '.join(writers) or buffer} is wrong"
        )

    expected = "each task is run once, after the tasks that it needs"
    hint = "is run() of every task called, once?"
    return wrong_results(seen, right, describe, expected=expected, hint=hint)


def _missing_edge(findings: Sequence[Finding]) -> str:
    """Which edge of the three kinds the first finding misses, as a hint."""
    first, _, then = str(findings[0] if findings else "").partition("\n  then")
    late = "collect" if ", collect" in then else "event" if first else ""
    return LAB.hint(SAFE, "input" if ", input" in first else late)


def slow(played: Played, right: Played) -> list[Violation]:
    """`step_law`, with what the learner's streams may be waiting for."""
    wrong = laws.step_law(played.step_ns, right.step_ns)
    if not wrong:
        return []
    serial = play(played.job, one_stream).step_ns * 0.99 <= played.step_ns
    names = {piece.name for piece in played.job.pieces}
    used = {op.launch_stream for op in played.program.ranks[0] if op.label in names}
    hint = LAB.hint(SHORT_STEPS, "one" if len(used) == 1 else "all")
    return [
        replace(
            violation,
            message=f"job '{played.job.name}': {violation.message}"
            + (", as on one stream" if serial else "")
            + " (right results, but something waits for too much)",
            hint=hint.format(stream=min(used, default="")),
        )
        for violation in wrong
    ]


# -- 3.2: the fewest waits


@lru_cache(maxsize=16)
def with_every_wait(number: int) -> Played:
    """The learner's job with a wait for each need."""
    own = pipeline(number)
    return own.play(own.every_wait)


@LAB.grader("3.2")
def grade_waits(sheet: Sheet, my_number: int, my_waits: Iterable[Wait]) -> None:
    """Any set of waits will do that keeps order and overlap and is as small."""
    own, waits = pipeline(my_number), list(my_waits)
    sheet.ran(f"your job, no. {my_number}, with {len(waits)} waits, on 2 ranks")
    pair = "(who must have ended, who waits for it)"
    sheet.verify(KNOWN, [Violation("waits", m, pair) for m in own.misfits(waits)])
    sheet.stop_if_wrong()
    played, full = own.play(waits), with_every_wait(my_number)
    played.draw_on(sheet, full.step_ns, f"your run with {len(waits)} waits")
    sheet.verify(SAFE, laws.no_findings_law(played.findings))
    sheet.verify(VALUES, wrong_tasks(played, full))
    sheet.stop_if_wrong()
    judge_step(sheet, SHORT_STEP, played, full.step_ns)
    fewest = fewest_waits(own)
    if len(waits) <= len(fewest):
        sheet.expect(FEW, True)
    else:
        spare = next((w for w in waits if w not in fewest), waits[-1])
        hint = LAB.cases("3.2", "spare")[FEW].format(spare=spare)
        LAB.expect(sheet, FEW, False, number=len(waits), hint=hint)
    sheet.note(
        f"{len(own.every_wait)} waits would do, {len(waits)} are enough: all others "
        "follow from stream order and these"
    )


# -- 3.3: three races


def _flat_truth(number: int) -> Mapping[str, object]:
    counts = given.num_grads(number)
    first = len(counts) - counts.index(2)
    return {"kind": "race", "tensor": f"flat {first}", "packed_on": "stream 1"}


def _event_truth(number: int) -> Mapping[str, object]:
    letters = given.tower_letters(number)
    rank = 0 if len(letters[0]) == 2 else 1
    return {"kind": "race", "rank": rank, "tensor": f"out {letters[rank][0]}"}


def _reuse_truth(number: int) -> Mapping[str, object]:
    """The first block that is given to a later batch too early, from the run itself."""
    seen = given.Case("3.3c", number).as_handed_out()
    first = seen.findings[0]
    written = seen.program.ranks[first.rank][first.ops[1]].writes
    now = {
        life.name
        for life in seen.program.storages
        if life.rank == first.rank and life.storage in {a.storage for a in written}
    }
    return {"kind": "reuse", "tensor": first.name, "overwritten_by": frozenset(now)}


def _cases(id: str, number: int) -> tuple[given.Case, ...]:
    """What the number draws; the next one's, larger, on another number of ranks."""
    return given.Case(id, number), given.Case(id, number + 1, num_ranks=3, more_ms=1)


REPAIRS: dict[str, Repair] = {}
for _id, _truth, _solution, _also in (
    ("3.3a", _flat_truth, reference.send_gradients, {}),
    ("3.3b", _event_truth, reference.look_up, {}),
    ("3.3c", _reuse_truth, reference.train, {LEAN: crowded}),
):
    REPAIRS[_id] = Repair(
        diagnosis=DIAGNOSIS,
        kept=OVERLAP_KEPT,
        truth=_truth,
        cases=partial(_cases, _id),
        play=given.Case.run,
        clock=EAGER,
        reference=_solution,
        wrong=lambda _, seen, right: wrong_results(seen, right),
        ran="your program on the objects of number {number}, 2 ranks",
        also=_also,
        but=(SET_UP,),
        hints={"cpu": CPU_HINT},
        where=LAB.cases("3.3a", "where")[DIAGNOSIS],
        kinds=LAB.cases("3.3a", "kinds")[DIAGNOSIS],
        title="your repair",
    )
    LAB.grader(_id)(REPAIRS[_id].grade)
