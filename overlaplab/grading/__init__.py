"""Grading rests on evidence: values on every rank, the program, the timeline.

For learners: `check("6.3", BucketedReducer)`. For instructors: `grade_notebook(path)`.

How to declare an exercise (in a course's labNN/checks, found by its entry point); its
words may stand in a file beside it (`declared`), and for settings of knobs, broken
programs and results of a run there are `forms`:

    from overlaplab.grading import Sheet, exercise
    from overlaplab.grading import fixtures, laws

    @exercise(
        "6.3",
        title="Finish",
        solution="finish",            # the name in the notebook; several: a tuple
        verifies=(                    # every sentence that the grader must write
            "gradients equal one process on the whole batch",
            "no operator races another",
        ),
        points=3,
    )
    def grade_finish(sheet: Sheet, finish: object) -> None:
        def make_reducer(model):      # given parts + the learner's
            return ...
        fixture = fixtures.clean_fixture()
        sheet.ran("3 steps of 8 layers on 2 ranks, chalk")
        trained = fixtures.train(fixture, make_reducer, steps=3, world_size=2)
        sheet.show(trained.run.timeline, step_ns=..., target_ns=...)
        grads, _ = fixtures.oracle(fixture, steps=3, world_size=2)
        for step in (1, 3):
            sheet.verify(
                "gradients equal one process on the whole batch",
                laws.values_law([g[step - 1] for g in trained.gradients],
                                grads[step - 1], step=step),
            )
        sheet.verify("no operator races another",
                     laws.no_findings_law(trained.run.warnings, kinds=("hazard",)))

What is text or data may stand in a file instead: see `overlaplab.grading.declared`.

Rules: an exercise passes only if every sentence of `verifies` was written and true
(written twice: both times). A grader that raises is a fail, and so is one that forgets.
Exceptions of the learner's code need no care: let them pass, they become the verdict.
`check(id, *objects)` calls `grade(sheet, *objects)`, in the order of `solution`.

Evidence (`Trained.evidence`; or `reading.collect_evidence(program, timeline)` of a run
that called `watch(model)` before the reducer was made, steps in `streams.step(k)`):
`.gradients` (ready_ns, sent_bytes, sends), `.sends` (covers, stale_bytes, pack),
`.bucket(names, step)` (ready, armed, pack, previous end, start), `.step_ns`.

Laws return lists of `Violation` (empty: it holds): prompt_law, step_law, once_law,
bytes_law, same_order_law, no_findings_law, leak_law, values_law, regret_law,
diagnosis_law; `regret` is a number. `overlap_law` is what an exercise on overlap asks:
prompt, and no wait in the backward pass, or else a step as fast as the reference's.
"""

from typing import TYPE_CHECKING, Any

from overlaplab.grading.exercise import (
    Exercise,
    Sheet,
    exercise,
    exercises,
    find_exercise,
)
from overlaplab.grading.verdict import CheckResult, Verdict
from overlaplab.grading.violation import Violation

if TYPE_CHECKING:
    from overlaplab.grading.judging import CheckFailed, check, judge

__all__ = [
    "CheckFailed",
    "CheckResult",
    "Exercise",
    "Sheet",
    "Verdict",
    "Violation",
    "check",
    "exercise",
    "exercises",
    "find_exercise",
    "judge",
]


def __getattr__(name: str) -> Any:
    """`judging` imports torch; who grades in other processes need not."""
    if name not in ("CheckFailed", "check", "judge"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from overlaplab.grading import judging

    return getattr(judging, name)
